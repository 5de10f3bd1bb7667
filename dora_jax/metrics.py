"""The one writer of a run's metrics: metrics.jsonl and TensorBoard events.

metrics.jsonl is the truth: it is only ever appended to, one strict JSON object
a line, so that it survives a crash and can be read while the run goes on.
"""

import json
import math
import operator
import os
import pathlib
import re
import time
from collections.abc import Mapping
from typing import Any, SupportsFloat

import tensorboardX
from absl import logging
from tensorboardX.proto import summary_pb2

# Protobuf makes its classes as it is imported, unseen by type checkers.
_Summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009
# stage/name_unit, and one more part for the members of a family, such as the
# bins of a histogram: train/lag_count/0.
_NAME = re.compile(r"[a-z][a-z0-9_]*(/[a-z0-9][a-z0-9_]*){1,2}")


class MetricsWriter:
  """Appends what was measured at each step; used by one thread.

  A point whose step is not beyond the last one that the file held at opening
  was written before, by the run that this one resumes: it carries
  `"resumed": true`, so that a reader can choose.

  Attributes:
    num_nonfinite: values that were NaN or infinite, written as null.
    num_lost: lines that the file system refused; training goes on without.
  """

  def __init__(self, workdir: str | os.PathLike[str]):
    folder = pathlib.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    self._last_step = mend(path)
    self._file = path.open("a", encoding="utf-8")
    self._events = tensorboardX.FileWriter(str(folder), flush_secs=10)
    self.num_nonfinite = 0
    self.num_lost = 0

  def write(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
    """Appends one line and one TensorBoard point a value.

    Args:
      step: finished training steps when the values were measured.
      values: name to number; a name reads `stage/name_unit`.
    """
    record: dict[str, object] = {"step": step, "time_s": time.time()}
    points = []
    if step <= self._last_step:
      record["resumed"] = True
    for name, value in values.items():
      if _NAME.fullmatch(name) is None:
        raise ValueError(
          f"Metric {name!r} must read stage/name_unit in lower case, such as "
          "train/step_s: rename it where it is measured."
        )
      number = float(value)
      if math.isfinite(number):
        record[name] = number
        points.append(_Summary.Value(tag=name, simple_value=number))
      else:
        record[name] = None
        self.num_nonfinite += 1
    # One event for all: each is a hand-over to the thread that writes them.
    self._events.add_summary(_Summary(value=points), step)
    self._append(json.dumps(record, allow_nan=False))

  def close(self) -> None:
    """Flushes and closes both files."""
    self._events.close()
    self._file.close()

  def _append(self, line: str) -> None:
    # A full disk must cost the curves, never the training.
    try:
      self._file.write(line + "\n")
      self._file.flush()
    except OSError as error:
      self.num_lost += 1
      logging.error(
        "metrics.jsonl lost a line of %d bytes: %s", len(line), error
      )


def mend(path: pathlib.Path) -> int:
  """Cuts off a line torn by a crash.

  Returns:
    The highest `step` of the lines, each a JSON object; -1 where there are none
    or there is no file.
  """
  last_step = -1
  if not path.exists():
    return last_step
  with path.open("r+b") as file:
    good_bytes = 0
    for number, line in enumerate(file, start=1):
      if not line.endswith(b"\n"):
        file.truncate(good_bytes)
        break
      good_bytes += len(line)
      try:
        last_step = max(last_step, operator.index(json.loads(line)["step"]))
      except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
          f"{path}, line {number}: holds nothing of a step ({error}): the "
          "file is damaged. Move it away, or give another --workdir."
        ) from error
  return last_step
