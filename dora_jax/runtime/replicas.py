"""Finds generator meshes that decode far slower than their peers.

A device that is throttled or shared with a stranger slows all that waits for
its requests. It is reported, and nothing else is done.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping

from absl import logging

_WINDOW_S = 30.0
# Decoding for less of a window says little about a mesh.
_LEAST_BUSY_SHARE = 0.2
# Of its peers' median, below which a mesh is slow.
_SLOW_SHARE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """What a generator mesh has done since the run began.

  Attributes:
    slot_steps: decode steps, times the slots decoded; full or not, they cost
      about the same.
    busy_s: seconds in which it decoded.
  """

  slot_steps: int
  busy_s: float


class Replicas:
  """Compares the meshes over windows of 30 s; used by the runtime's thread.

  Attributes:
    least_share: the slowest mesh's rate over its peers' median, in the last
      window in which two could be compared; None before.
  """

  def __init__(self, read: Callable[[], Mapping[str, Work]], *, now_s: float):
    """Begins the first window.

    Args:
      read: what each mesh has done so far, by its name.
      now_s: on the clock that `look` is given.
    """
    self.least_share: float | None = None
    self._read = read
    self._began_s = now_s
    self._before = read()
    self._reported: set[str] = set()

  def look(self, now_s: float) -> None:
    """Ends the window where it is over, and reports what is found, once."""
    if now_s - self._began_s < _WINDOW_S:
      return
    work = self._read()
    rates = rates_of(self._before, work, window_s=now_s - self._began_s)
    self._began_s, self._before = now_s, work
    shares = shares_of_peers(rates)
    if shares:
      self.least_share = min(shares.values())
    for name, share in shares.items():
      if share < _SLOW_SHARE and name not in self._reported:
        self._reported.add(name)
        logging.warning(
          "%s is slow: in the last %.0f s it decoded %.0f slot steps a second "
          "while busy, %.0f%% of its peers' median. Nothing is done about it.",
          name,
          _WINDOW_S,
          rates[name],
          100 * share,
        )

  def metrics(self) -> dict[str, float]:
    """What a step reports; nothing before two meshes could be compared."""
    if self.least_share is None:
      return {}
    return {"rollout/slowest_generator_share": self.least_share}


def rates_of(
  before: Mapping[str, Work], after: Mapping[str, Work], *, window_s: float
) -> dict[str, float]:
  """Slot steps a busy second, of the meshes that were busy for long enough."""
  rates = {}
  for name, work in after.items():
    busy_s = work.busy_s - before[name].busy_s
    if busy_s >= _LEAST_BUSY_SHARE * window_s:
      rates[name] = (work.slot_steps - before[name].slot_steps) / busy_s
  return rates


def shares_of_peers(rates: Mapping[str, float]) -> dict[str, float]:
  """Each rate over the median of the others; nothing for one alone."""
  shares = {}
  for name, rate in rates.items():
    peers = [other for peer, other in rates.items() if peer != name]
    median = statistics.median(peers) if peers else 0.0
    if median > 0:
      shares[name] = rate / median
  return shares
