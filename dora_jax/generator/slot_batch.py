"""The slots of a lane: who is in which, with which pages, and how to enter."""

import dataclasses
from collections.abc import Callable, Sequence

from dora_jax.generator import engine as engine_lib
from dora_jax.generator import filling as filling_lib
from dora_jax.generator import (
  kv_pool,
  kv_transfer,
  pages,
  prefill,
  scheduler,
  verbs,
  waiting,
)
from dora_jax.generator import live as live_lib


@dataclasses.dataclass(kw_only=True)
class Counters:
  """What a lane has done since it was made; only ever grows.

  Attributes:
    decoded_tokens: tokens sampled, but for those cut.
    cut_tokens: tokens sampled after the end of their completion, which the host
      has found only after the chunk.
    prefilled_tokens: prompt tokens whose KV was computed for a new request.
    reprefilled_tokens: tokens whose KV was computed again, for newer params.
    found_tokens: tokens of either kind whose KV was there already.
    shared_prompts: new requests that found all of their prompt.
    busy_slot_steps: decode steps of slots with a request.
    total_slot_steps: decode steps of all slots.
    moved_in_tokens: positions whose KV came from another generator.
    moved_in: requests taken over from another generator.
    moved_out: requests that another generator has taken over.
    spilled: requests whose pages were taken from them for a while.
    cancelled: requests given up.
  """

  decoded_tokens: int = 0
  cut_tokens: int = 0
  prefilled_tokens: int = 0
  reprefilled_tokens: int = 0
  found_tokens: int = 0
  shared_prompts: int = 0
  busy_slot_steps: int = 0
  total_slot_steps: int = 0
  moved_in_tokens: int = 0
  moved_in: int = 0
  moved_out: int = 0
  spilled: int = 0
  cancelled: int = 0


class SlotBatch:
  """The decode batch of one lane, on the host and on its mesh.

  Attributes:
    num_slots: requests that fit.
    on_mesh: the batch there; replaced by each verb, which consumes it.
    live: slot -> the request in it.
    filling: the request that is half done, if one is: it has a slot and pages,
      but is not in `live` before all of its KV is computed.
  """

  def __init__(
    self,
    *,
    num_slots: int,
    engine: engine_lib.Engine,
    pool: kv_pool.SharedPool,
    counters: Counters,
  ):
    self.num_slots = num_slots
    self.on_mesh = engine.create_slots(num_slots)
    self.live: dict[int, live_lib.Live] = {}
    self.filling: filling_lib.Filling | None = None
    self._engine = engine
    self._pool = pool
    self._counters = counters
    # Slots of the live requests of each prompt.
    self._members: dict[scheduler.PromptKey, list[int]] = {}

  def num_running(self) -> int:
    """Requests that the next chunk decodes."""
    return sum(not live.is_paused for live in self.live.values())

  def has_begun(self) -> bool:
    """Whether any request that the next chunk decodes was decoded before."""
    return any(
      live.num_sampled and not live.is_paused for live in self.live.values()
    )

  def num_seated(self) -> int:
    """Slots that are not free."""
    return len(self.live) + (self.filling is not None)

  def num_unfinished(self) -> int:
    """Requests in slots whose trajectory is not done."""
    return self.num_seated() - sum(
      live.has_ended for live in self.live.values()
    )

  def find(self, is_meant: Callable[[live_lib.Live], bool]) -> list[int]:
    """The slots of the requests that are meant."""
    return [slot for slot, live in self.live.items() if is_meant(live)]

  def pause(self, slots: Sequence[int]) -> None:
    """Stops decoding these requests; they keep slot and pages."""
    self._switch(slots, is_active=False)

  def resume(self, slots: Sequence[int]) -> None:
    """Goes on with paused requests where they were."""
    self._switch(slots, is_active=True)

  def leave(self, slot: int) -> None:
    """Frees a slot, which is inactive on the mesh, and the claim on pages."""
    live = self.live.pop(slot)
    live.claim.release()
    members = self._members[live.prompt_key]
    members.remove(slot)
    if not members:
      del self._members[live.prompt_key]

  def read(self, claim: pages.PageClaim, position: int) -> kv_pool.KvPool:
    """A copy of the pages of a request, on the mesh, up to this position."""
    num_pages = pages.num_pages_for(position, self._engine.page_size)
    return self._engine.read_pages(self._pool.kv, claim.page_ids[:num_pages])

  def can_fill(
    self, line: waiting.WaitingLine, version: int, *, admits: bool
  ) -> bool:
    """Whether `fill` would do anything."""
    if self.filling is not None:
      return True
    if not admits or self._free_slot() is None:
      return False
    return line.num_holding > 0 or self._plan_next(line, version) is not None

  def fill(
    self,
    served: verbs.Served,
    line: waiting.WaitingLine,
    version: int,
    *,
    admits: bool,
  ) -> bool:
    """Moves requests from the line into free slots while there is room.

    Prefills what they lack, but no more than a call does. One request at most
    is left half done: so whatever a request finds is computed before it.

    Args:
      served: the params.
      line: where they wait.
      version: of the params.
      admits: whether others may enter than the one that was left half done.

    Returns:
      Whether one is left half done, for the next call to go on with.
    """
    entries: list[engine_lib.Entry] = []
    blocks: list[prefill.Block] = []
    while True:
      if self.filling is None and admits:
        self.filling = self._enter_next(line, version)
      if self.filling is None:
        break
      blocks += self._take_blocks(self.filling, taken=len(blocks))
      if self.filling.blocks:
        break
      entries.append(self._seat(self.filling))
      self.filling = None
    if blocks:
      self._pool.kv = self._engine.prefill(served, self._pool.kv, blocks)
    if entries:
      # Copies pages, so after those are filled.
      self._pool.kv, self.on_mesh = self._engine.insert(
        self._pool.kv, self.on_mesh, entries
      )
    return self.filling is not None

  def withdraw(self) -> kv_transfer.Parcel | None:
    """Takes slot and pages from the request that is half done, if one is.

    The pages that are filled are found when it comes again, unless others have
    needed them meanwhile.
    """
    filling, self.filling = self.filling, None
    if filling is None:
      return None
    filling.live.claim.release()
    return filling.parcel

  def _free_slot(self) -> int | None:
    free = (slot for slot in range(self.num_slots) if slot not in self.live)
    return next(free, None)

  def _plan_next(
    self, line: waiting.WaitingLine, version: int
  ) -> scheduler.Admission | None:
    """How the first that waits for pages enters; None if none can."""
    parcel = next(line.without_pages(), None)
    if parcel is None:
      return None
    admission = scheduler.plan_admission(
      parcel.request,
      parcel.prefilled(),
      version=version,
      allocator=self._pool.allocator,
      page_size=self._engine.page_size,
    )
    # A later, shorter one must not overtake it, or it could wait for ever.
    return None if admission.num_lacking else admission

  def _enter_next(
    self, line: waiting.WaitingLine, version: int
  ) -> filling_lib.Filling | None:
    """Takes the next one from the line, if there is a slot and room for it."""
    slot = self._free_slot()
    if slot is None:
      return None
    if line.num_holding:
      parcel = line.pop_holding()
      assert parcel.claim is not None
      key = scheduler.prompt_key(parcel.request, version)
      live = live_lib.unpack(parcel, prompt_key=key, claim=parcel.claim)
      return filling_lib.Filling(slot=slot, parcel=parcel, live=live)
    admission = self._plan_next(line, version)
    if admission is None:
      return None
    return self._enter(line.pop(), admission, slot, version)

  def _enter(
    self,
    parcel: kv_transfer.Parcel,
    admission: scheduler.Admission,
    slot: int,
    version: int,
  ) -> filling_lib.Filling:
    """Gives a request its pages; writes the KV that it brings along."""
    allocator, page_size = self._pool.allocator, self._engine.page_size
    found = list(admission.found)
    # Before any are allocated, which could take idle ones of these.
    allocator.share(found)
    claim = pages.PageClaim(
      allocator=allocator, page_ids=found + allocator.alloc(admission.num_new)
    )
    key = scheduler.prompt_key(parcel.request, version)
    live = live_lib.unpack(parcel, prompt_key=key, claim=claim)
    filling = filling_lib.Filling(
      slot=slot, parcel=parcel, live=live, keys=admission.keys
    )
    if parcel.kv is not None:
      self._write(parcel.kv, filling, num_found=len(found))
      return filling
    filling.copied_from = self._find_copy(live, admission)
    if filling.copied_from is None:
      filling.blocks = filling_lib.cut(
        parcel.prefilled(),
        claim.page_ids,
        num_found=len(found),
        page_size=page_size,
        block_pages=self._engine.prefill_sizes.block_pages,
      )
    self._counters.found_tokens += filling.num_kv_tokens
    if not live.num_sampled and live.position and not filling.blocks:
      self._counters.shared_prompts += 1
    return filling

  def _find_copy(
    self, live: live_lib.Live, admission: scheduler.Admission
  ) -> int | None:
    """A page to copy that begins with the prompt's tokens past its full pages.

    What the other member has decoded into it since lies at positions that this
    request writes before it reads them.
    """
    num_full = len(admission.keys)
    is_found = len(admission.found) == num_full
    if live.num_sampled or not is_found:
      return None
    if not live.position % self._engine.page_size:
      return None
    for slot in self._members.get(live.prompt_key, []):
      return self.live[slot].claim.page_ids[num_full]
    return None

  def _write(
    self, kv: kv_pool.KvPool, filling: filling_lib.Filling, *, num_found: int
  ) -> None:
    """Puts carried KV into the pages that do not have it yet."""
    page_ids = filling.live.claim.page_ids
    num_filled = pages.num_pages_for(
      filling.live.position, self._engine.page_size
    )
    targets = [pages.TRASH_PAGE] * num_found
    targets += page_ids[num_found:num_filled]
    self._pool.kv = self._engine.write_pages(self._pool.kv, kv, targets)
    filling.label(num_found, len(filling.keys))

  def _take_blocks(
    self, filling: filling_lib.Filling, *, taken: int
  ) -> list[prefill.Block]:
    """The next blocks of a request that a call with so many has room for."""
    room = self._engine.prefill_sizes.call_blocks - taken
    blocks = filling.take_blocks(room, self._engine.page_size)
    num_tokens = sum(len(block.tokens) for block in blocks)
    if filling.live.num_sampled:
      self._counters.reprefilled_tokens += num_tokens
    else:
      self._counters.prefilled_tokens += num_tokens
    return blocks

  def _seat(self, filling: filling_lib.Filling) -> engine_lib.Entry:
    live = filling.live
    request = live.request
    self.live[filling.slot] = live
    self._members.setdefault(live.prompt_key, []).append(filling.slot)
    sampled = live.tokens[-1]
    return engine_lib.Entry(
      slot=filling.slot,
      page_ids=live.claim.page_ids,
      token=int(sampled[-1] if len(sampled) else request.prompt[-1]),
      position=live.position,
      last_position=len(request.prompt) - 1 + request.max_new_tokens,
      sampling=request.sampling,
      stop_ids=request.stopping.stop_ids,
      draw=(request.stream, request.group_id, request.member),
      copied_from=filling.copied_from,
    )

  def _switch(self, slots: Sequence[int], *, is_active: bool) -> None:
    if not slots:
      return
    for slot in slots:
      self.live[slot].is_paused = not is_active
    self.on_mesh = self._engine.switch(self.on_mesh, slots, is_active=is_active)
