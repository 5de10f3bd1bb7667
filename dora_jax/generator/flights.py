"""Chunks that the mesh decodes while the host is still reading earlier ones."""

import collections
import dataclasses
from collections.abc import Collection
from typing import Any

import jax

from dora_jax import types
from dora_jax.generator import live as live_lib
from dora_jax.generator import slot_batch, stopping, verbs


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Flight:
  """A chunk under way.

  Attributes:
    packed: what it samples, on the mesh, as `verbs.unpack_chunk` reads it.
    lives: slot -> who was decoded in it when it was launched.
  """

  packed: Any
  lives: dict[int, live_lib.Live]


class Flights:
  """Launched chunks in their order, and what those that have landed finished.

  The host may be a chunk behind the mesh. Whoever ends on the mesh, by a stop
  token or at its limit, is inactive in the next chunk, so that its slot and its
  pages are free as soon as the host knows. Whoever only the host can end, by a
  stop string or a repetition, goes on in the chunks that are under way: what it
  samples there is cut, and it keeps slot and pages until the last has landed.

  Attributes:
    finished: trajectories that are done and were not taken yet.
  """

  def __init__(
    self,
    *,
    slots: slot_batch.SlotBatch,
    counters: slot_batch.Counters,
    stop_ids: Collection[int],
    decode_text: stopping.Decode,
  ):
    self.finished: list[types.Trajectory] = []
    self._slots = slots
    self._counters = counters
    self._stop_ids = frozenset(stop_ids)
    self._decode_text = decode_text
    self._flights: collections.deque[_Flight] = collections.deque()

  def __len__(self) -> int:
    return len(self._flights)

  def add(self, packed: Any) -> None:
    """Takes in a chunk that was launched for all who are not paused."""
    lives = {
      slot: live
      for slot, live in self._slots.live.items()
      if not live.is_paused
    }
    self._flights.append(_Flight(packed=packed, lives=lives))

  def land(self, *, most_left: int) -> None:
    """Waits for the oldest chunks until no more than so many are under way."""
    while len(self._flights) > most_left:
      self._land_one(self._flights.popleft())

  def take_finished(self) -> list[types.Trajectory]:
    """The trajectories that were not taken yet."""
    finished, self.finished = self.finished, []
    return finished

  def _land_one(self, flight: _Flight) -> None:
    # The one wait for the mesh, and the one array that comes from it.
    chunk = verbs.unpack_chunk(jax.device_get(flight.packed))
    num_sampled_B = chunk.is_sampled_TB.sum(axis=0)
    self._counters.busy_slot_steps += int(num_sampled_B.sum())
    num_steps = int(num_sampled_B.max())
    self._counters.total_slot_steps += num_steps * self._slots.num_slots
    overran = []
    for slot, live in flight.lives.items():
      if live.has_ended:
        self._counters.cut_tokens += int(num_sampled_B[slot])
        self._leave_if_landed(slot, live)
        continue
      taken = live.take(
        chunk, slot, stop_ids=self._stop_ids, decode=self._decode_text
      )
      self._counters.decoded_tokens += taken.num_kept
      self._counters.cut_tokens += taken.num_cut
      if taken.reason is None:
        continue
      self.finished.append(live_lib.finish(live, taken.reason))
      live.has_ended = True
      if taken.overran:
        overran.append(slot)
      else:
        self._slots.leave(slot)
    self._slots.pause(overran)
    for slot in overran:
      self._leave_if_landed(slot, flight.lives[slot])

  def _leave_if_landed(self, slot: int, live: live_lib.Live) -> None:
    """Frees the place of one that has ended, unless a chunk writes to it."""
    is_seated = self._slots.live.get(slot) is live
    is_under_way = any(
      flight.lives.get(slot) is live for flight in self._flights
    )
    if is_seated and not is_under_way:
      self._slots.leave(slot)
