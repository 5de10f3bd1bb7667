"""The slots of one virtual generator: who is live, and when the next one stops.

Every live request gets one token a decode step, so a request that enters when
the generator's token clock reads t stops when it reads t + what it lacks. The
clock stands still between looks; nothing is done per token.
"""

import heapq
import itertools
import math
from collections.abc import Iterator

from dora_jax.simulator import costs, requests

# Of a clock that is a sum of floats.
_EPSILON = 1e-6
# Few enough to look at all of them.
_FEW = 16


class Slots:
  """Advances live requests together.

  Attributes:
    clock: decode steps that a request which never left would have had.
    context: positions whose KV the live requests hold.
    busy_steps: decode steps of slots with a request.
    steps: decode steps.
  """

  def __init__(self, chunk_steps: int):
    self.clock = 0.0
    self.context = 0.0
    self.busy_steps = self.steps = 0.0
    self._chunk_steps = chunk_steps
    self._live: dict[requests.Name, requests.Live] = {}
    self._stops: list[tuple[float, int, requests.Live]] = []
    self._entries = itertools.count()

  def __len__(self) -> int:
    return len(self._live)

  def __iter__(self) -> Iterator[requests.Live]:
    return iter(self._live.values())

  def __contains__(self, name: requests.Name) -> bool:
    return name in self._live

  def seconds(self, cost: costs.Costs, num_steps: float) -> float:
    """What so many steps take from now on."""
    return cost.decode_s(len(self._live), self.context, num_steps)

  def steps_within(self, cost: costs.Costs, seconds: float) -> float:
    """Decode steps, a part of the last included, that fit into the time."""
    return cost.decode_steps(len(self._live), self.context, seconds)

  def advance(self, num_steps: float) -> None:
    """Lets all live requests have so many tokens more."""
    self.clock += num_steps
    self.context += len(self._live) * num_steps
    self.busy_steps += len(self._live) * num_steps
    self.steps += num_steps

  def enter(self, live: requests.Live) -> None:
    """Gives a request a slot."""
    live.entered, live.entry = self.clock, next(self._entries)
    self._live[live.name] = live
    self.context += live.context
    stop = self.clock + live.next_stop() - live.sampled
    heapq.heappush(self._stops, (stop, live.entry, live))

  def leave(self, name: requests.Name) -> requests.Live:
    """Takes a request out of its slot, with what it has sampled."""
    live = self._live.pop(name)
    num_steps = self.clock - live.entered
    self.context -= live.context + num_steps
    if not self._live:
      self.context = 0.0  # Sums of floats would leave a trace.
    num_sampled = min(
      int(num_steps + _EPSILON), live.next_stop() - live.sampled
    )
    live.sampled += num_sampled
    live.context += num_sampled
    return live

  def pop_stopped(self) -> list[requests.Live]:
    """Takes out those that have reached their stop."""
    stopped = []
    while self._stops and self._stops[0][0] <= self.clock + _EPSILON:
      _, entry, live = heapq.heappop(self._stops)
      if self._is_current(live, entry):
        stopped.append(self.leave(live.name))
    return stopped

  def youngest(self) -> requests.Live:
    """Who entered last."""
    return self._live[next(reversed(self._live))]

  def to_next_stop(self) -> float:
    """Steps to the end of the chunk in which the next request stops.

    A chunk ends early where nobody is left in it.
    """
    while self._stops and not self._is_current(
      self._stops[0][2], self._stops[0][1]
    ):
      heapq.heappop(self._stops)
    end = self.to_boundary(self._stops[0][0] - self.clock)
    if len(self._stops) <= _FEW:
      last = max(
        stop
        for stop, entry, live in self._stops
        if self._is_current(live, entry)
      )
      end = min(end, last - self.clock)
    return end

  def to_boundary(self, num_steps: float) -> float:
    """So many steps, rounded up to whole chunks from now on."""
    chunks = math.ceil(num_steps / self._chunk_steps - _EPSILON)
    return float(chunks * self._chunk_steps)

  def _is_current(self, live: requests.Live, entry: int) -> bool:
    return live.entry == entry and self._live.get(live.name) is live
