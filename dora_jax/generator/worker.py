"""All generators of one mesh: one engine, one KV pool, one or several lanes."""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dora_jax import types
from dora_jax.generator import checks, kv_pool, lane, pages, stopping
from dora_jax.generator import engine as engine_lib
from dora_jax.generator.attention import base
from dora_jax.model import transformer


class MeshWorker:
  """Owns what the lanes of a mesh share, and lets them take turns.

  One thread, which the runtime makes, drives it and its lanes.

  Attributes:
    lanes: the generators, in the order given.
  """

  def __init__(
    self,
    *,
    mesh: Mesh,
    config: transformer.ModelConfig,
    paged: base.PagedAttention,
    lanes: Sequence[tuple[int, int]],
    page_size: int,
    num_pages: int | None = None,
    max_length: int,
    prefill_chunk: int,
    chunk_steps: int,
    chunks_ahead: int,
    stop_ids: Sequence[int],
    decode_text: stopping.Decode,
    seed: int,
    dtype: DTypeLike,
  ):
    """Makes the pool and the lanes; compiles nothing yet.

    Args:
      mesh: devices, with the one axis "tensor".
      config: sizes of the model.
      paged: how to attend over pages.
      lanes: (generator_id, num_slots) of each.
      page_size: token positions of a page.
      num_pages: pages of the pool, the trash page included; None makes enough
        for every slot of every lane to reach max_length at once.
      max_length: most tokens of a sequence, prompt and completion together.
      prefill_chunk: most tokens whose KV a lane computes between two chunks of
        decoding.
      chunk_steps: decode steps between two looks of the host.
      chunks_ahead: chunks that may be under way while the host reads one.
      stop_ids: tokens that end a completion.
      decode_text: the text of tokens, in which stop strings are looked for.
      seed: of the run; what is drawn depends on it.
      dtype: of the KV pool; the params' own.
    """
    pages_a_slot = pages.num_pages_for(max_length, max(page_size, 1))
    num_slots = sum(slots for _, slots in lanes)
    if num_pages is None:
      num_pages = 1 + num_slots * pages_a_slot
    checks.check_sizes(
      mesh=mesh,
      config=config,
      page_size=page_size,
      max_length=max_length,
      prefill_chunk=prefill_chunk,
      chunk_steps=chunk_steps,
    )
    checks.check_stop_ids(stop_ids, config.vocab_size)
    if num_pages < 1 + pages_a_slot:
      raise ValueError(
        f"The KV pool has {num_pages} pages, but one sequence of {max_length} "
        f"tokens and the trash page need {1 + pages_a_slot}: raise "
        "config.generator.num_pages."
      )
    self._pool = kv_pool.SharedPool(
      kv=paged.create_pool(
        config,
        mesh=mesh,
        num_pages=num_pages,
        page_size=page_size,
        dtype=dtype,
      ),
      allocator=pages.PageAllocator(num_pages),
      page_size=page_size,
    )
    self.engine = engine_lib.Engine(
      mesh=mesh,
      config=config,
      paged=paged,
      page_size=page_size,
      max_length=max_length,
      prefill_chunk=prefill_chunk,
      chunk_steps=chunk_steps,
      stop_ids=stop_ids,
      seed=seed,
    )
    self.lanes = [
      lane.Lane(
        generator_id=generator_id,
        num_slots=slots,
        engine=self.engine,
        pool=self._pool,
        config=config,
        max_length=max_length,
        stop_ids=stop_ids,
        decode_text=decode_text,
        chunks_ahead=chunks_ahead,
      )
      for generator_id, slots in lanes
    ]

  @property
  def pages_in_use(self) -> int:
    """Pages of the pool that live requests hold."""
    return self._pool.allocator.num_used

  @property
  def num_pages(self) -> int:
    """Pages of the pool that requests may hold."""
    return self._pool.allocator.num_pages - 1

  def discard(self) -> None:
    """Frees the pages and lets go of all params, for it will not be used again.

    Whatever was live is lost.
    """
    for a_lane in self.lanes:
      a_lane.discard()
    for leaf in jax.tree.leaves(self._pool.kv):
      leaf.delete()
    self._pool.allocator = pages.PageAllocator(self._pool.allocator.num_pages)

  def can_advance(self) -> bool:
    """Whether any lane can; not while all that is live is paused."""
    starved: int | None = None
    for a_lane in self._oldest_first():
      admits = starved is None or a_lane.version == starved
      if a_lane.can_advance(admits=admits):
        return True
      if admits and a_lane.num_lacking_pages():
        if any(each.spillable() for each in self._newer_than(a_lane)):
          return True
        starved = a_lane.version
    return False

  def step(self) -> list[tuple[int, list[types.Trajectory]]]:
    """Advances each lane that can by a chunk.

    All chunks are started before the first is waited for, so that the mesh
    works on one while the host reads another. The trainer waits for the oldest
    version: its lane goes first, and while it waits for pages, lanes of newer
    versions make room and admit nobody.

    Returns:
      (generator_id, finished trajectories) of each lane that was advanced.
    """
    advanced = []
    starved: int | None = None
    for a_lane in self._oldest_first():
      admits = starved is None or a_lane.version == starved
      if admits:
        self._make_room(a_lane)
      if a_lane.can_advance(admits=admits):
        a_lane.launch(admits=admits)
        advanced.append(a_lane)
      if admits and a_lane.num_lacking_pages():
        starved = a_lane.version
    return [(a_lane.generator_id, a_lane.collect()) for a_lane in advanced]

  def _make_room(self, starved: lane.Lane) -> None:
    """Spills requests of newer lanes until the next one of this lane fits.

    It begins with the youngest of the newest lane. They come back once no
    older lane waits for pages any more, for until then theirs admits nobody.
    """
    for donor in self._newer_than(starved):
      for name in donor.spillable():
        if not starved.num_lacking_pages():
          return
        # One by one: how many pages it frees depends on who shares them.
        donor.spill([name])

  def _oldest_first(self) -> list[lane.Lane]:
    loaded = [each for each in self.lanes if each.version is not None]
    return sorted(loaded, key=_version)

  def _newer_than(self, a_lane: lane.Lane) -> list[lane.Lane]:
    """Lanes of newer versions, the newest first."""
    found = self._oldest_first()
    newer = [each for each in found if _version(each) > _version(a_lane)]
    return newer[::-1]


def _version(a_lane: lane.Lane) -> int:
  assert a_lane.version is not None
  return a_lane.version
