"""Raises an alarm where a metric climbs, well before it is large.

The gap between the engines tends to grow by steps too small for a threshold,
until training collapses.
"""

import collections
import statistics
from collections.abc import Mapping
from typing import Any

from absl import logging

# Medians: one step out of line is no trend.
_WINDOW = 20
# By which the later median must exceed the first.
_FACTOR = 3.0


class TrendAlarm:
  """Compares a metric's last 20 steps with its first 20, by their medians."""

  def __init__(self) -> None:
    """Begins to watch."""
    self._first: list[float] = []
    self._last = collections.deque[float](maxlen=_WINDOW)
    self._has_rung = False

  def state(self) -> dict[str, Any]:
    """What it has seen, JSON-able."""
    return {
      "first": list(self._first),
      "last": list(self._last),
      "has_rung": self._has_rung,
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state."""
    self._first = list(state["first"])
    self._last = collections.deque[float](state["last"], maxlen=_WINDOW)
    self._has_rung = state["has_rung"]

  def note(self, value: float) -> str | None:
    """Takes the metric of a step.

    Returns:
      What is wrong, once: at the step at which the trend is first seen.
    """
    if len(self._first) < _WINDOW:
      self._first.append(value)
      return None
    self._last.append(value)
    if self._has_rung or len(self._last) < _WINDOW:
      return None
    before = statistics.median(self._first)
    now = statistics.median(self._last)
    if now <= _FACTOR * before:
      return None
    self._has_rung = True
    return (
      f"its median over {_WINDOW} steps has grown from {before:.3g} to "
      f"{now:.3g}, more than {_FACTOR:g} times"
    )


def watch_mismatch(alarm: TrendAlarm, metrics: Mapping[str, float]) -> None:
  """Warns where what engine and trainer disagree about keeps growing."""
  if "mismatch_kl_k3" not in metrics:
    return
  found = alarm.note(metrics["mismatch_kl_k3"])
  if found is not None:
    logging.warning(
      "train/mismatch_kl_k3 keeps growing: %s. Worst is group %d, member %d. "
      "See config.model.compute_dtype and config.generator.dtype.",
      found,
      metrics["worst_group_id"],
      metrics["worst_member"],
    )
