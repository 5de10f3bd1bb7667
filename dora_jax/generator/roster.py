"""All requests of a lane: in slots, waiting for one, or held for a move."""

import dataclasses
from collections.abc import Callable, Collection, Sequence

import jax

from dora_jax import types
from dora_jax.generator import engine as engine_lib
from dora_jax.generator import (
  kv_pool,
  kv_transfer,
  pages,
  scheduler,
  slot_batch,
  waiting,
)
from dora_jax.generator import live as live_lib

# (group_id, member): what a request is called from outside.
Name = tuple[int, int]
_Any = live_lib.Live | kv_transfer.Parcel

# The evaluation's requests bear the names of others and are never moved.
_TRAINING_STREAM = 0


class Roster:
  """Carries requests between slots, the waiting line and other lanes.

  But for what counts, only to be used while no chunk is under way: who is in a
  slot is then not finished, and has all the KV that it needs to be decoded. One
  may be half prefilled instead: whatever takes requests out of their place
  first sends it back to the line.

  Attributes:
    slots: requests that are decoded, and paused ones that keep their place.
    line: requests that wait for a slot.
  """

  def __init__(
    self,
    *,
    generator_id: int,
    slots: slot_batch.SlotBatch,
    engine: engine_lib.Engine,
    counters: slot_batch.Counters,
  ):
    self.slots = slots
    self.line = waiting.WaitingLine()
    self._generator_id = generator_id
    self._engine = engine
    self._counters = counters
    # Paused requests without a slot.
    self._held: dict[Name, kv_transfer.Parcel] = {}

  def num_live(self) -> int:
    """Requests that have come and neither finished nor left."""
    return len(self.line) + self.slots.num_unfinished() + len(self._held)

  def num_kv_tokens(self) -> int:
    """Positions whose KV they hold, in the pool or off it."""
    parcels = [*self.line, *self._held.values()]
    filling = self.slots.filling
    return (
      sum(live.position for live in self.slots.live.values())
      + sum(parcel.num_kv_tokens for parcel in parcels)
      + (filling.num_kv_tokens if filling is not None else 0)
    )

  def num_lacking_pages(
    self, version: int, allocator: pages.PageAllocator
  ) -> int:
    """Pages that are to become free before the next in line gets its own.

    Only for training's requests, and only where a slot is free for the next.
    """
    first = next(self.line.without_pages(), None)
    num_seated = self.slots.num_seated() + self.line.num_holding
    if first is None or num_seated >= self.slots.num_slots:
      return 0
    if first.request.stream != _TRAINING_STREAM:
      return 0
    admission = scheduler.plan_admission(
      first.request,
      first.prefilled(),
      version=version,
      allocator=allocator,
      page_size=self._engine.page_size,
    )
    return admission.num_lacking

  def spillable(self) -> list[Name]:
    """Requests of training that hold pages and are not paused.

    Those without a slot come first, then the one that is half prefilled, then
    the latest groups, from the last member on, for whose pages nobody waits as
    long.
    """
    idle = [parcel for parcel in self.line if parcel.claim is not None]
    filling = self.slots.filling
    half = [] if filling is None else [filling.parcel]
    running = [live for live in self.slots.live.values() if not live.is_paused]
    return [
      one.name
      for those in (idle, half, running)
      for one in sorted(those, key=lambda one: one.name, reverse=True)
      if one.request.stream == _TRAINING_STREAM
    ]

  def submit(self, requests: Sequence[types.Request]) -> None:
    """Queues new requests, which have been checked."""
    self.line.add_new(
      [kv_transfer.new_parcel(request, request.version) for request in requests]
    )

  def extract(
    self, names: Collection[Name], *, copies_kv: bool
  ) -> list[kv_transfer.Parcel]:
    """Pauses those of the requests that are here, and packs them."""
    self._withdraw()
    is_meant = _is_one_of(names)
    paused = [live for live in self.slots.live.values() if live.is_paused]
    for one in [*paused, *self._held.values()]:
      if is_meant(one):
        raise RuntimeError(
          f"{self._call(one)} is paused by a move already: forget or resume it "
          "before it moves again."
        )
    slots = self.slots.find(is_meant)
    self.slots.pause(slots)
    queued = self.line.take(is_meant)
    self._held |= {parcel.name: parcel for parcel in queued}
    lives = [self.slots.live[slot] for slot in slots]
    parcels = [live.pack(claim=live.claim) for live in lives] + queued
    return [self._copy_kv(p) for p in parcels] if copies_kv else parcels

  def restore(self, parcels: Sequence[kv_transfer.Parcel]) -> int:
    """Takes over requests, which have been checked; returns KV positions.

    Raises:
      ValueError: one of them is here already.
    """
    self._withdraw()
    here = {live.name for live in self.slots.live.values()}
    here |= {parcel.name for parcel in self.line} | self._held.keys()
    for parcel in parcels:
      if parcel.name in here:
        raise ValueError(f"{self._call(parcel)} is there already.")
      here.add(parcel.name)
    # Their KV stays off the pool until they get a slot, for then they need all
    # pages that they may ever fill. What lies on a host stays there.
    carried = [self._carry(parcel.kv) for parcel in parcels]
    # What goes wrong with the copies must do so before anything is taken.
    jax.block_until_ready(carried)
    claims = [p.claim.share() if p.claim else None for p in parcels]
    self.line.add_returned(
      [
        dataclasses.replace(parcel, kv=kv, claim=claim)
        for parcel, kv, claim in zip(parcels, carried, claims, strict=True)
      ]
    )
    num_kv_tokens = sum(parcel.num_kv_tokens for parcel in parcels)
    self._counters.moved_in += len(parcels)
    self._counters.moved_in_tokens += num_kv_tokens
    return num_kv_tokens

  def forget(self, names: Collection[Name]) -> None:
    """Frees what paused requests hold here.

    Raises:
      RuntimeError: one of them is not paused.
    """
    self._withdraw()
    is_meant = _is_one_of(names)
    running = [live for live in self.slots.live.values() if not live.is_paused]
    for one in [*running, *self.line]:
      if is_meant(one):
        raise RuntimeError(
          f"{self._call(one)} is not paused by a move, so it cannot be "
          "forgotten: extract or cancel it."
        )
    self._counters.moved_out += len(self._remove(is_meant))

  def resume(self, names: Collection[Name]) -> None:
    """Goes on with those of the requests that are paused."""
    is_meant = _is_one_of(names)
    self.slots.resume(
      self.slots.find(lambda live: live.is_paused and is_meant(live))
    )
    held = [parcel for parcel in self._held.values() if is_meant(parcel)]
    for parcel in held:
      del self._held[parcel.name]
    self.line.put_back(held)

  def spill(self, names: Collection[Name]) -> list[Name]:
    """Takes pages and slots from requests, whose KV waits on the host.

    They are next in line for pages. Paused ones stay as they are; who is half
    prefilled goes back to the line too, but brings no KV to the host.
    """
    self._withdraw()
    meant = _is_one_of(names)
    slots = self.slots.find(lambda live: not live.is_paused and meant(live))
    lives = [self.slots.live[slot] for slot in slots]
    holding = self.line.take(lambda p: p.claim is not None and meant(p))
    packed = [live.pack(claim=live.claim) for live in lives] + holding
    copied = [self._copy_kv(parcel) for parcel in packed]
    parcels = [
      dataclasses.replace(parcel, kv=jax.device_get(parcel.kv))
      for parcel in copied
    ]
    self.slots.pause(slots)
    for slot in slots:
      self.slots.leave(slot)
    _release(holding)
    self.line.put_back(parcels)
    self._counters.spilled += len(parcels)
    return [parcel.name for parcel in parcels]

  def cancel(self, names: Collection[Name]) -> list[tuple[int, int, int]]:
    """Gives up requests, paused or not: (group_id, member, tokens) of each."""
    self._withdraw()
    is_meant = _is_one_of(names)
    self.slots.pause(
      self.slots.find(lambda live: not live.is_paused and is_meant(live))
    )
    gone = self._remove(is_meant)
    queued = self.line.take(is_meant)
    _release(queued)
    gone += [(*parcel.name, len(parcel.tokens)) for parcel in queued]
    self._counters.cancelled += len(gone)
    return gone

  def age(self, version: int) -> None:
    """Puts every request under another version, hence without its KV.

    All go back to the line, in order, but for paused ones, which are held.
    """
    self._withdraw()
    lives = list(self.slots.live.values())
    running = [live.pack() for live in lives if not live.is_paused]
    paused = [live.pack() for live in lives if live.is_paused]
    queued = self.line.take(lambda _: True)
    held = list(self._held.values())
    self.slots.pause(self.slots.find(lambda live: not live.is_paused))
    for slot in list(self.slots.live):
      self.slots.leave(slot)
    _release(queued + held)
    begun = running + [parcel for parcel in queued if len(parcel.tokens)]
    new = [parcel for parcel in queued if not len(parcel.tokens)]
    self.line.put_back([parcel.aged(version) for parcel in begun])
    self.line.add_new([parcel.aged(version) for parcel in new])
    self._held = {p.name: p.aged(version) for p in paused + held}

  def _withdraw(self) -> None:
    """Puts who is half prefilled back, so that all are in line or done.

    It loses no more than its place in the batch: `SlotBatch.withdraw`.
    """
    parcel = self.slots.withdraw()
    if parcel is not None:
      self.line.put_back([parcel])

  def _carry(self, kv: kv_pool.KvPool | None) -> kv_pool.KvPool | None:
    if kv is None or not isinstance(jax.tree.leaves(kv)[0], jax.Array):
      return kv
    return self._engine.carry(kv)

  def _copy_kv(self, parcel: kv_transfer.Parcel) -> kv_transfer.Parcel:
    """The parcel with a copy of its pages instead of a claim on them."""
    if parcel.claim is None:
      return parcel
    kv = None
    if parcel.position:
      kv = self.slots.read(parcel.claim, parcel.position)
    return dataclasses.replace(parcel, kv=kv, claim=None)

  def _remove(
    self, is_meant: Callable[[_Any], bool]
  ) -> list[tuple[int, int, int]]:
    """Takes those that are meant, which are all paused, out of their place."""
    gone = []
    for slot in self.slots.find(is_meant):
      live = self.slots.live[slot]
      gone.append((*live.name, live.num_sampled))
      self.slots.leave(slot)
    held = [parcel for parcel in self._held.values() if is_meant(parcel)]
    _release(held)
    for parcel in held:
      gone.append((*parcel.name, len(parcel.tokens)))
      del self._held[parcel.name]
    return gone

  def _call(self, one: _Any) -> str:
    group_id, member = one.name
    return (
      f"Member {member} of group {group_id}, on generator {self._generator_id},"
    )


def _is_one_of(names: Collection[Name]) -> Callable[[_Any], bool]:
  meant = frozenset(names)
  return lambda one: (
    one.name in meant and one.request.stream == _TRAINING_STREAM
  )


def _release(parcels: Sequence[kv_transfer.Parcel]) -> None:
  """Lets go of the pages that those hold which wait without a slot."""
  for parcel in parcels:
    if parcel.claim is not None:
      parcel.claim.release()
