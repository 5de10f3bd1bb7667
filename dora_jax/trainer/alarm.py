"""Raises an alarm where a metric climbs, well before it is large.

The gap between the engines tends to grow by steps too small for a threshold,
until training collapses.
"""

import collections
import statistics

# Medians: one step out of line is no trend.
_WINDOW = 20


class TrendAlarm:
  """Compares a metric's last steps with its first ones."""

  def __init__(self, *, factor: float):
    """Begins to watch.

    Args:
      factor: by which the median over the last 20 steps must exceed that over
        the first 20 for an alarm.
    """
    self._factor = factor
    self._first: list[float] = []
    self._last = collections.deque[float](maxlen=_WINDOW)
    self._has_rung = False

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
    if now <= self._factor * before:
      return None
    self._has_rung = True
    return (
      f"its median over {_WINDOW} steps has grown from {before:.3g} to "
      f"{now:.3g}, more than {self._factor:g} times"
    )
