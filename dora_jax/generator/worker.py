"""All generators of one mesh: one engine, one KV pool, one or several lanes."""

from collections.abc import Sequence

from jax.sharding import Mesh
from jax.typing import DTypeLike

from dora_jax import types
from dora_jax.generator import checks, kv_pool, lane, pages
from dora_jax.generator import engine as engine_lib
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
    lanes: Sequence[tuple[int, int]],
    page_size: int,
    num_pages: int | None = None,
    max_length: int,
    chunk_steps: int,
    stop_ids: Sequence[int],
    seed: int,
    dtype: DTypeLike,
  ):
    """Makes the pool and the lanes; compiles nothing yet.

    Args:
      mesh: devices, with the one axis "tensor".
      config: sizes of the model.
      lanes: (generator_id, num_slots) of each.
      page_size: token positions of a page.
      num_pages: pages of the pool, the trash page included; None makes enough
        for every slot of every lane to reach max_length at once.
      max_length: most tokens of a sequence, prompt and completion together.
      chunk_steps: decode steps between two looks of the host.
      stop_ids: tokens that end a completion.
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
      kv=kv_pool.create_pool(
        config,
        mesh=mesh,
        num_pages=num_pages,
        page_size=page_size,
        dtype=dtype,
      ),
      allocator=pages.PageAllocator(num_pages),
    )
    self.engine = engine_lib.Engine(
      mesh=mesh,
      config=config,
      page_size=page_size,
      max_length=max_length,
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

  def can_advance(self) -> bool:
    """Whether any lane can; not while all that is live is paused."""
    return any(a_lane.can_advance() for a_lane in self.lanes)

  def step(self) -> list[tuple[int, list[types.Trajectory]]]:
    """Advances each lane that can by a chunk.

    All chunks are started before the first is waited for, so that the mesh
    works on one while the host reads another.

    Returns:
      (generator_id, finished trajectories) of each lane that was advanced.
    """
    busy = [a_lane for a_lane in self.lanes if a_lane.can_advance()]
    for a_lane in busy:
      a_lane.launch()
    return [(a_lane.generator_id, a_lane.collect()) for a_lane in busy]
