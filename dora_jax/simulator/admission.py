"""Who enters the slots of a virtual generator, and who has to leave for pages.

Pages are handed out as they are written. Requests are let in up to a share of
the pages; where those that run outgrow the rest, the youngest are spilled to
the host, and come back first. So a generator can hold far more requests than if
each reserved its longest possible length.
"""

import collections
import math
from collections.abc import Iterable, Iterator

from dora_jax.simulator import costs, requests, slots

# Share of the pages up to which requests are let in; the rest is for growth.
_ADMIT_SHARE = 0.95


class Line:
  """Requests without a slot, and the pages that they wait for.

  Attributes:
    num_spilled: times that a request's KV went to the host.
  """

  def __init__(
    self,
    *,
    into: slots.Slots,
    cost: costs.Costs,
    num_slots: int,
    kv_capacity: int,
    chunk_steps: int,
  ):
    """Is empty.

    Args:
      into: the slots.
      cost: of prefill and of KV from the host.
      num_slots: most requests in slots.
      kv_capacity: tokens whose KV there is room for.
      chunk_steps: for which there must be room before a chunk.
    """
    self.num_spilled = 0
    self._slots = into
    self._cost = cost
    self._num_slots = num_slots
    self._capacity = kv_capacity
    self._chunk_steps = chunk_steps
    self._waiting: collections.deque[requests.Live] = collections.deque()
    # Members of a group share the KV of their prompt.
    self._groups: collections.Counter[int] = collections.Counter()

  def __len__(self) -> int:
    return len(self._waiting)

  def __iter__(self) -> Iterator[requests.Live]:
    return iter(self._waiting)

  def extend(self, lives: Iterable[requests.Live]) -> None:
    """Lets requests wait."""
    self._waiting.extend(lives)

  def remove(self, live: requests.Live) -> None:
    """Lets a request wait no more."""
    self._waiting.remove(live)

  def admit(self) -> float:
    """Lets in whoever fits; seconds of prefill and of KV that comes back."""
    stall_s = 0.0
    while self._waiting and len(self._slots) < self._num_slots:
      live = self._waiting[0]
      growth = (len(self._slots) + 1) * self._chunk_steps
      needed = self._slots.context + live.context + growth
      if len(self._slots) and needed > _ADMIT_SHARE * self._capacity:
        break
      self._waiting.popleft()
      stall_s += self._fill_s(live)
      self._groups[live.name[0]] += 1
      self._slots.enter(live)
    return stall_s

  def left(self, live: requests.Live) -> None:
    """Hears that a request has left its slot."""
    group_id = live.name[0]
    self._groups[group_id] -= 1
    if not self._groups[group_id]:
      del self._groups[group_id]

  def spill(self) -> float:
    """Makes room for a chunk; seconds that it takes."""
    stall_s = 0.0
    while len(self._slots) > 1 and self.steps_to_full() < self._chunk_steps:
      live = self._slots.leave(self._slots.youngest().name)
      self.left(live)
      live.spilled = live.context
      self.num_spilled += 1
      stall_s += live.context * self._cost.kv_token_spill_s
      self._waiting.appendleft(live)
    return stall_s

  def steps_to_full(self) -> float:
    """Decode steps, in whole chunks, after which the pages are full.

    They are enough for one request alone, whatever its length.
    """
    if len(self._slots) == 1:
      return math.inf
    room = self._capacity - self._slots.context
    num_chunks = room / len(self._slots) // self._chunk_steps
    return max(0.0, num_chunks * self._chunk_steps)

  def _fill_s(self, live: requests.Live) -> float:
    """Seconds to bring a request's KV into pages."""
    unfilled = live.unfilled
    is_prompt = not (live.sampled or live.spilled)
    if is_prompt and live.name[0] in self._groups:
      unfilled = 0
    seconds = unfilled * self._cost.prefill_token_s
    seconds += live.spilled * self._cost.kv_token_spill_s
    live.unfilled = live.spilled = 0
    return seconds
