"""The slots of a lane: who is in which, with which pages, and how to enter."""

import collections
import dataclasses
from collections.abc import Callable, Sequence

from dora_jax.generator import engine as engine_lib
from dora_jax.generator import (
  kv_pool,
  kv_transfer,
  pages,
  scheduler,
  verbs,
  waiting,
)
from dora_jax.generator import live as live_lib

# Tokens to prefill, and the pages to fill, the trash page where not to.
_Row = tuple[live_lib.Live, Sequence[int]]


@dataclasses.dataclass(kw_only=True)
class Counters:
  """What a lane has done since it was made; only ever grows.

  Attributes:
    decoded_tokens: tokens sampled, but for those cut.
    cut_tokens: tokens sampled after the end of their completion, which the host
      has found only after the chunk.
    prefilled_tokens: prompt tokens whose KV was computed for a new request.
    reprefilled_tokens: tokens whose KV was computed again, for newer params.
    shared_prompts: requests that found their prompt prefilled.
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
    self._engine = engine
    self._pool = pool
    self._counters = counters
    # Slots of the live requests of each prompt, which share its full pages.
    self._members: dict[scheduler.PromptKey, list[int]] = {}

  def num_running(self) -> int:
    """Requests that the next chunk decodes."""
    return sum(not live.is_paused for live in self.live.values())

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

  def can_admit(self, line: waiting.WaitingLine, version: int) -> bool:
    """Whether `admit` would admit anyone."""
    if len(self.live) == self.num_slots:
      return False
    return bool(line.num_holding or self._plan(line, version))

  def admit(
    self, served: verbs.Served, line: waiting.WaitingLine, version: int
  ) -> None:
    """Moves requests from the line into free slots while there is room."""
    entries = []
    for slot in self._free_slots()[: line.num_holding]:
      parcel = line.pop_holding()
      assert parcel.claim is not None
      key = scheduler.prompt_key(parcel.request, version)
      live = live_lib.unpack(parcel, prompt_key=key, claim=parcel.claim)
      entries.append(self._seat(live, slot, copied_from=None))
    rows: list[_Row] = []
    for admission in self._plan(line, version):
      parcel = line.pop()
      assert parcel.request is admission.request
      entries.append(self._enter(parcel, admission, rows))
    if entries:
      self._prefill(served, rows)
      # Copies pages, so after those are filled.
      self._pool.kv, self.on_mesh = self._engine.insert(
        self._pool.kv, self.on_mesh, entries
      )

  def _plan(
    self, line: waiting.WaitingLine, version: int
  ) -> list[scheduler.Admission]:
    return scheduler.plan_admissions(
      (parcel.request for parcel in line.without_pages()),
      version=version,
      free_slots=self._free_slots(),
      num_free_pages=self._pool.allocator.num_free,
      page_size=self._engine.page_size,
      live_prompts=self._members.keys(),
    )

  def _free_slots(self) -> list[int]:
    return [slot for slot in range(self.num_slots) if slot not in self.live]

  def _enter(
    self,
    parcel: kv_transfer.Parcel,
    admission: scheduler.Admission,
    rows: list[_Row],
  ) -> engine_lib.Entry:
    """Gives a request slot and pages; writes its KV, or adds it to `rows`."""
    allocator, page_size = self._pool.allocator, self._engine.page_size
    num_shared = admission.num_shared
    # Pages of the prompt that this request must not write: they have its KV.
    num_found, copied_from = 0, None
    if admission.is_first:
      shared = allocator.alloc(num_shared)
    else:
      relative = self.live[self._members[admission.prompt_key][0]]
      shared = list(relative.claim.page_ids[:num_shared])
      allocator.share(shared)
      num_found = num_shared
      # What the relative has decoded into this page since lies at positions
      # that this request writes before it reads them.
      if not len(parcel.tokens):
        self._counters.shared_prompts += 1
        if parcel.position % page_size:
          copied_from = relative.claim.page_ids[num_shared]
    claim = pages.PageClaim(
      allocator=allocator,
      page_ids=shared + allocator.alloc(admission.num_private),
    )
    live = live_lib.unpack(parcel, prompt_key=admission.prompt_key, claim=claim)
    num_filled = pages.num_pages_for(parcel.position, page_size)
    filled = [pages.TRASH_PAGE] * num_found
    filled += claim.page_ids[num_found:num_filled]
    if parcel.kv is not None:
      self._pool.kv = self._engine.write_pages(self._pool.kv, parcel.kv, filled)
    elif parcel.position and (admission.is_first or len(parcel.tokens)):
      rows.append((live, filled))
    return self._seat(live, admission.slot, copied_from=copied_from)

  def _seat(
    self, live: live_lib.Live, slot: int, *, copied_from: int | None
  ) -> engine_lib.Entry:
    request = live.request
    self.live[slot] = live
    self._members.setdefault(live.prompt_key, []).append(slot)
    sampled = live.tokens[-1]
    return engine_lib.Entry(
      slot=slot,
      page_ids=live.claim.page_ids,
      token=int(sampled[-1] if len(sampled) else request.prompt[-1]),
      position=live.position,
      last_position=len(request.prompt) - 1 + request.max_new_tokens,
      sampling=request.sampling,
      stop_ids=request.stopping.stop_ids,
      draw=(request.stream, request.group_id, request.member),
      copied_from=copied_from,
    )

  def _prefill(self, served: verbs.Served, rows: Sequence[_Row]) -> None:
    """Computes the KV of these requests, one call a bucket of lengths."""
    buckets = collections.defaultdict(list)
    for live, filled in rows:
      tokens = live.sequence()[:-1]
      bucket = self._engine.bucket_pages(len(tokens))
      buckets[bucket].append((tokens, filled))
      if live.num_sampled:
        self._counters.reprefilled_tokens += len(tokens)
      else:
        self._counters.prefilled_tokens += len(tokens)
    for bucket_rows in buckets.values():
      self._pool.kv = self._engine.prefill(
        served, self._pool.kv, bucket_rows, num_rows=self.num_slots
      )

  def _switch(self, slots: Sequence[int], *, is_active: bool) -> None:
    if not slots:
      return
    for slot in slots:
      self.live[slot].is_paused = not is_active
    self.on_mesh = self._engine.switch(self.on_mesh, slots, is_active=is_active)
