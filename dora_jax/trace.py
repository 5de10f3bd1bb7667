"""The timeline of a run as Chrome trace events, for ui.perfetto.dev.

Source: Trace Event Format, JSON array format, in which the closing bracket may
be missing: a trace whose process died still loads. Perfetto colours a slice by
its name, so slices named after their version are coloured by version.
"""

import json
import math
import os
import pathlib
import threading
from typing import Any, SupportsFloat

from absl import logging

# Counters belong to a process of their own, above the groups of tracks.
_COUNTERS = 0


class Trace:
  """Streams events to a file, one a line; any thread may call it.

  Times are seconds of one clock that the caller reads: `time.perf_counter` on
  real devices, the virtual clock in a simulation. Whatever comes after `close`
  is dropped, as a part that stops last may still report.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self._lock = threading.Lock()
    self._groups: dict[str, int] = {}
    self._tracks: dict[tuple[str, str], int] = {}
    self._group_of: dict[int, int] = {}
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _keep_earlier(path)
    # Unbuffered, one write an event: a dying process leaves whole lines.
    self._file = path.open("xb", buffering=0)
    self._is_open = True
    first = _named("process_name", _COUNTERS, 0, name="counters")
    self._write(b"[\n" + json.dumps(first).encode())

  def track(self, name: str, group: str) -> int:
    """The id of the track with this name in this group, made if it is new.

    Groups, and the tracks in each, are shown in the order they were made.
    """
    with self._lock:
      if (name, group) in self._tracks:
        return self._tracks[name, group]
      if group not in self._groups:
        process = self._groups[group] = len(self._groups) + 1
        self._emit(_named("process_name", process, 0, name=group))
        self._emit(_named("process_sort_index", process, 0, sort_index=process))
      process = self._groups[group]
      track = self._tracks[name, group] = len(self._tracks) + 1
      self._group_of[track] = process
      self._emit(_named("thread_name", process, track, name=name))
      self._emit(_named("thread_sort_index", process, track, sort_index=track))
      return track

  def span(
    self, track: int, name: str, start_s: float, end_s: float, **args: Any
  ) -> None:
    """Draws a slice; slices of one track nest or follow each other."""
    if end_s < start_s:
      raise ValueError(
        f"Span {name!r} ends at {end_s} s, before its start at {start_s} s: "
        "both times must come from one clock."
      )
    self._emit_at(
      track,
      {
        "ph": "X",
        "name": name,
        "ts": _microseconds(start_s),
        "dur": _microseconds(end_s - start_s),
        "args": args,
      },
    )

  def instant(self, track: int, name: str, time_s: float, **args: Any) -> None:
    """Draws a mark on a track."""
    event = {"ph": "i", "s": "t", "name": name, "args": args}
    self._emit_at(track, event | {"ts": _microseconds(time_s)})

  def counter(self, name: str, time_s: float, **values: SupportsFloat) -> None:
    """Sets the curves of one chart to their values from this time on."""
    numbers = {key: float(value) for key, value in values.items()}
    event = {"ph": "C", "name": name, "pid": _COUNTERS, "args": numbers}
    with self._lock:
      self._emit(event | {"ts": _microseconds(time_s)})

  def close(self) -> None:
    """Ends the array: from here on the file is valid JSON."""
    with self._lock:
      if self._is_open:
        self._write(b"\n]\n")
      self._file.close()
      self._is_open = False

  def _emit_at(self, track: int, event: dict[str, Any]) -> None:
    with self._lock:
      self._emit(event | {"pid": self._group_of[track], "tid": track})

  def _emit(self, event: dict[str, Any]) -> None:
    if not self._is_open:
      return
    line = json.dumps(_strict(event), allow_nan=False, default=str)
    self._write(b",\n" + line.encode())

  def _write(self, data: bytes) -> None:
    # A full disk must cost the timeline, never the training.
    try:
      self._file.write(data)
    except OSError as error:
      logging.error("The trace ends here, for its file refuses: %s", error)
      self._file.close()
      self._is_open = False


def _named(kind: str, process: int, track: int, **args: Any) -> dict[str, Any]:
  return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": args}


def _microseconds(seconds: float) -> float:
  return round(seconds * 1e6, 3)


def _strict(value: Any) -> Any:
  """Turns NaN and infinities, which JSON lacks, into text."""
  if isinstance(value, dict):
    return {key: _strict(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_strict(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value


def _keep_earlier(path: pathlib.Path) -> None:
  """Moves the trace of an earlier run in this workdir to `NAME.1.json`, …"""
  number = 1
  while path.exists():
    earlier = path.with_suffix(f".{number}{path.suffix}")
    if not earlier.exists():
      path.rename(earlier)
    number += 1
