"""A run's events on file: written, read back, replayed, followed.

The coordinator decides by its events and their times alone, so that the record
of both is the record of every decision. `replay` repeats the decisions without
a run; a `ReplayGate` makes a live run take them again.

The file is gzip over lines of JSON. Line 1 tells the format, the fields of each
class of events, and the arguments that made the coordinator; every further line
is one event, [now_s, class, value of each field, …].
"""

import collections
import dataclasses
import itertools
import json
import pathlib
import typing
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from absl import logging

from dora_jax.coordinator import coordinator as coordinator_lib
from dora_jax.coordinator import events as ev

FILE_NAME = "events.jsonl.gz"

TimedEvent = tuple[ev.Event, float]
_Key = tuple[str | int, ...]

_FORMAT = 1
_CLASSES = {cls.__name__: cls for cls in typing.get_args(ev.Event)}
_FIELDS = {
  name: [field.name for field in dataclasses.fields(cls)]
  for name, cls in _CLASSES.items()
}
# A killed run loses at most so much of its record.
_FLUSH_LINES = 256
_FLUSH_S = 1.0
_GZIP = 31  # zlib's wbits for a gzip stream with the largest window
_READ_BYTES = 1 << 16
# What JSON of another shape raises where it is taken for an event.
_BROKEN = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class EventWriter:
  """Writes events as they are handled; used by one thread.

  What a killed run leaves behind can be read up to its last flush.

  Attributes:
    num_written: events in the file.
  """

  def __init__(
    self,
    path: pathlib.Path,
    header: Mapping[str, Any],
    *,
    num_kept: int | None = None,
  ):
    """Begins a file, in place of any that is there, or goes on with that.

    Args:
      path: of the file.
      header: the arguments that made the coordinator; JSON-able.
      num_kept: events of the file that is there to keep, as its run goes on
        from there; None keeps none, nor its header.
    """
    self.num_written = 0
    kept = []
    if num_kept is not None and path.exists():
      kept = list(itertools.islice(_whole_lines(path), 1 + num_kept))
    # Beside the old one, lest a crash now lose what is to be kept.
    part = path.with_suffix(".part")
    self._file = part.open("wb")
    self._compressor = zlib.compressobj(wbits=_GZIP)
    # Compressing releases the GIL, which the runtime's thread may wait long to
    # get back; so lines wait here, and are compressed once a flush.
    self._lines: list[str] = []
    self._flushed_s: float | None = None
    if kept:
      self._lines = [line.decode() + "\n" for line in kept]
      self.num_written = len(kept) - 1
    else:
      self._write_line(
        {"format": _FORMAT, "fields": _FIELDS, "arguments": dict(header)}
      )
    if num_kept is not None and self.num_written < num_kept:
      logging.warning(
        "%s held %d of the %d events before the checkpoint: it cannot be "
        "followed or replayed.",
        path,
        self.num_written,
        num_kept,
      )
    self.flush()
    part.replace(path)

  def write(self, event: ev.Event, now_s: float) -> None:
    """Appends an event.

    Args:
      event: as the coordinator gets it.
      now_s: as the coordinator gets it.
    """
    name = type(event).__name__
    values = [getattr(event, field) for field in _FIELDS[name]]
    # A float's repr reads back as the same bits. Differences of times would be
    # longer, not shorter: they end in the digits of both roundings.
    self._write_line([float(now_s), name, *values])
    self.num_written += 1
    if self._flushed_s is None:
      self._flushed_s = now_s
    if len(self._lines) >= _FLUSH_LINES or now_s - self._flushed_s >= _FLUSH_S:
      self.flush()
      self._flushed_s = now_s

  def flush(self) -> None:
    """Brings all that was written into the file; call it where a run hangs."""
    self._compress(zlib.Z_SYNC_FLUSH)
    self._file.flush()

  def close(self) -> None:
    """Ends the file; a second call does nothing."""
    if not self._file.closed:
      self._compress(zlib.Z_FINISH)
      self._file.close()

  def _write_line(self, value: Any) -> None:
    line = json.dumps(value, separators=(",", ":"), allow_nan=False)
    self._lines.append(line + "\n")

  def _compress(self, ending: int) -> None:
    """Compresses the lines that wait, as one piece."""
    text = "".join(self._lines).encode()
    self._lines.clear()
    data = self._compressor.compress(text) + self._compressor.flush(ending)
    self._file.write(data)


def read_events(
  path: pathlib.Path,
) -> tuple[dict[str, Any], Iterator[TimedEvent]]:
  """Reads a record, of a killed run up to its last whole line.

  Returns:
    The header that its writer was given, and the events with their times, read
    as they are asked for.

  Raises:
    ValueError: the file has no whole line, or other code has written it; an
      event, as it is asked for, cannot be read.
  """
  lines = _whole_lines(path)
  first = next(lines, None)
  if first is None:
    raise ValueError(f"{path} has no whole line: it records no run.")
  try:
    head = json.loads(first)
    found, fields = head["format"], dict(head["fields"])
    arguments = dict(head["arguments"])
  except _BROKEN as error:
    raise _unreadable(path, 1, error) from error
  if found != _FORMAT:
    raise ValueError(
      f"{path} has format {found}, but this code reads {_FORMAT}: "
      "read it with the code that wrote it."
    )
  for name, its_fields in fields.items():
    if its_fields != _FIELDS.get(name):
      raise ValueError(
        f"{path} holds events {name} with the fields {its_fields}, but this "
        f"code's have {_FIELDS.get(name)}: read it with the code that wrote it."
      )
  return arguments, _decode_all(path, lines)


def _whole_lines(path: pathlib.Path) -> Iterator[bytes]:
  # gzip.open would fail at a cut end, and take what it had read with it.
  decompressor = zlib.decompressobj(wbits=_GZIP)
  tail = b""
  with path.open("rb") as file:
    while part := file.read(_READ_BYTES):
      try:
        text = decompressor.decompress(part)
      except zlib.error as error:
        raise ValueError(
          f"{path} is no record of a run, or is damaged ({error})."
        ) from error
      *lines, tail = (tail + text).split(b"\n")
      yield from lines


def _decode_all(
  path: pathlib.Path, lines: Iterator[bytes]
) -> Iterator[TimedEvent]:
  for number, line in enumerate(lines, start=2):
    try:
      event = _decode(line)
    except _BROKEN as error:
      raise _unreadable(path, number, error) from error
    yield event


def _unreadable(
  path: pathlib.Path, number: int, error: Exception
) -> ValueError:
  return ValueError(
    f"{path}, line {number}: holds nothing that a run has recorded "
    f"({type(error).__name__}: {error}): the file is damaged."
  )


def _decode(line: bytes) -> TimedEvent:
  now_s, name, *values = json.loads(line)
  fields = zip(_FIELDS[name], map(_as_tuple, values), strict=True)
  return _CLASSES[name](**dict(fields)), now_s


def _as_tuple(value: Any) -> Any:
  """Makes tuples of JSON's arrays: events hold no other sequence."""
  if isinstance(value, list):
    return tuple(map(_as_tuple, value))
  return value


def replay(
  coordinator: coordinator_lib.Coordinator, events: Iterable[TimedEvent]
) -> list[list[ev.Command]]:
  """Drives a bare coordinator, made as the recorded one was.

  Returns:
    The commands that followed from each event. The coordinator is left as the
    recorded one was after the last event, so that a hang can be looked into.
  """
  return [coordinator.handle(event, now_s) for event, now_s in events]


class ReplayGate:
  """Makes a live run follow a record, event by event.

  The run offers what really happens, in whatever order; it feeds its
  coordinator with nothing but what `next` returns: the recorded events, in
  recorded order and with recorded times, each once its real counterpart has
  been offered. Counterparts are counted, for a group may be generated twice.

  What decides nothing by itself (Progress), or comes from outside (Tick,
  StopRequested), is taken from the record alone. A real StopRequested is passed
  on at once all the same. Where a generator is lost, here or in the record, the
  run ends: what the lost one had finished by then is a matter of time.
  """

  def __init__(self, events: Iterable[TimedEvent]):
    """Reads the events as it needs them."""
    self._rest = iter(events)
    self._head = next(self._rest, None)
    self._last = self._head
    self._num_fed = 0
    # Only what is still to be used up: no key has an empty queue.
    self._offered: dict[_Key, collections.deque[ev.Event]] = {}
    self._stops: list[ev.Event] = []

  def offer(self, event: ev.Event) -> None:
    """Tells that this has really happened.

    Raises:
      ValueError: a generator is lost, without which no record can be followed.
    """
    if isinstance(event, ev.StopRequested):
      self._stops.append(event)
    elif isinstance(event, ev.GeneratorLost):
      raise ValueError(
        f"Generator {event.generator_id} is lost: the run can no longer follow "
        "its record, which needs every generator. Start it again."
      )
    elif (key := _counterpart(event)) is not None:
      self._offered.setdefault(key, collections.deque()).append(event)

  def next(self) -> list[TimedEvent]:
    """Returns what to feed now; call it only while the run has not ended.

    Raises:
      ValueError: the record is at its end, or the run has left it.
    """
    now_s = 0.0 if self._last is None else self._last[1]
    ready: list[TimedEvent] = [(stop, now_s) for stop in self._stops]
    self._stops.clear()
    if self._head is None and not ready:
      last = "" if self._last is None else f", the last {self._last[0]}"
      raise ValueError(
        f"The record ends after {self._num_fed} events{last}, but the run has "
        "not ended: the recorded run was cut off there."
      )
    while self._head is not None and self._take(self._head[0]):
      ready.append(self._head)
      self._last = self._head
      self._num_fed += 1
      self._head = next(self._rest, None)
    return ready

  def waiting_for(self) -> ev.Event | None:
    """The recorded event to come next; None at the end of the record."""
    return None if self._head is None else self._head[0]

  def _take(self, recorded: ev.Event) -> bool:
    """Uses up the counterpart; False where it has not been offered yet."""
    if isinstance(recorded, ev.GeneratorLost | ev.VersionLost | ev.Resumed):
      raise ValueError(
        f"The record goes on with {recorded} after {self._num_fed} events: a "
        "run in which a generator was lost, or which was resumed, cannot be "
        "followed past there. `record.replay` repeats its decisions."
      )
    key = _counterpart(recorded)
    if key is None:
      return True
    if key not in self._offered:
      return False
    real = self._offered[key].popleft()
    if not self._offered[key]:
      del self._offered[key]
    if _has_left(real, recorded):
      raise ValueError(
        f"The run has left its record at event {self._num_fed}: recorded is "
        f"{recorded}, but what happened is {real}. It must have the config, "
        "the params and the machine of the recorded run."
      )
    if isinstance(recorded, ev.Cancelled):
      self._forget_finished(recorded)
    return True

  def _forget_finished(self, recorded: ev.Cancelled) -> None:
    """Leaves out what finished here before its Cancel, but not in the record.

    Its Finished was offered before the Cancelled, and must not be taken for
    that of the same member generated anew.
    """
    cancelled = {member[:2] for member in recorded.cancelled}
    for key in list(self._offered):
      if key[0] == "Finished" and key[1:3] in cancelled:
        del self._offered[key]


def _counterpart(event: ev.Event) -> _Key | None:
  """What a recorded event shares with the real one that it stands for."""
  match event:
    case ev.GeneratorJoined():
      return "GeneratorJoined", event.generator_id
    case ev.Loaded():
      return "Loaded", event.generator_id, event.version
    case ev.Finished():
      # Where it ran does not change its tokens; which version ran it does, and
      # tells a group that is generated anew from what it was before.
      return "Finished", event.group_id, event.member, event.version
    case ev.Scored() | ev.ScoreFailed():
      return "Scored", event.group_id, event.member
    case ev.StepDone():
      return "StepDone", event.version
    case ev.StepSkipped():
      # Others of the same step may follow.
      return "StepSkipped", event.step
    case ev.Moved():
      return "Moved", event.source_id, event.target_id
    case ev.Cancelled():
      return "Cancelled", event.generator_id
    case ev.DataExhausted():
      return "DataExhausted", event.num_groups
    case (
      ev.Tick()
      | ev.Progress()
      | ev.GeneratorLost()
      | ev.VersionLost()
      | ev.StopRequested()
    ):
      return None
    case ev.Resumed():
      return ("Resumed",)
    case _:
      typing.assert_never(event)


def _has_left(real: ev.Event, recorded: ev.Event) -> bool:
  """Whether a counterpart shows that the two runs are no longer the same."""
  if isinstance(real, ev.Finished) and isinstance(recorded, ev.Finished):
    return real != dataclasses.replace(recorded, generator_id=real.generator_id)
  if isinstance(real, ev.Scored) and isinstance(recorded, ev.Scored):
    return real.is_solved != recorded.is_solved
  # The record would train on a reward that the run does not have. The other way
  # round it can be followed: the group is dropped as it was.
  return isinstance(real, ev.ScoreFailed) and isinstance(recorded, ev.Scored)
