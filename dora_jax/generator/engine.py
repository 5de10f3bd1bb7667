"""The verbs of a generator, compiled: prefill, insert, decode, and others.

The verbs are JetStream's (https://github.com/AI-Hypercomputer/JetStream). A
slot frees itself on the device when its request ends, and its pages are the
host's to account for, so there is nothing to compile for `free`. For moves
there are `switch`, which pauses slots, and `read_pages` and `write_pages`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from dora_jax import interfaces, types
from dora_jax.generator import kv_pool, pages, prefill, sampling, verbs
from dora_jax.generator.attention import base
from dora_jax.model import layer_list, transformer

# The shortest sequences that scoring is compiled for.
_BUCKET_TOKENS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """What `insert` puts into one slot.

  Attributes:
    slot: the slot.
    page_ids: pages of the request, in order of position.
    token: the last token that the request has, of its prompt or sampled.
    position: its position.
    last_position: position of the last token that may be sampled.
    sampling: the distribution to sample from.
    stop_ids: stop tokens of the request alone.
    draw: (stream, group_id, member), which fix the random draws.
    copied_from: page of another member of the group that holds the beginning of
      the page with the position; None where there is nothing to copy.
  """

  slot: int
  page_ids: Sequence[int]
  token: int
  position: int
  last_position: int
  sampling: types.Sampling
  stop_ids: Sequence[int]
  draw: tuple[int, int, int]
  copied_from: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JittedVerbs:
  """The functions of `verbs`, jitted."""

  create_slots: Callable[..., verbs.Slots]
  prefill: jax.stages.Wrapped
  insert: Callable[..., tuple[kv_pool.KvPool, verbs.Slots]]
  decode: jax.stages.Wrapped
  score: Callable[..., jax.Array]
  switch: Callable[..., verbs.Slots]
  read_pages: Callable[..., kv_pool.KvPool]
  write_pages: Callable[..., kv_pool.KvPool]


@functools.cache
def jit_verbs(
  mesh: Mesh,
  config: transformer.ModelConfig,
  paged: base.PagedAttention,
  chunk_steps: int,
  stop_ids: tuple[int, ...],
) -> JittedVerbs:
  """Jits the verbs once for all engines that are made alike."""
  everywhere = NamedSharding(mesh, PartitionSpec())
  split = paged.sharding(mesh)
  decode = functools.partial(
    verbs.decode,
    config=config,
    paged=paged,
    chunk_steps=chunk_steps,
    stop_ids=stop_ids,
  )
  return JittedVerbs(
    create_slots=jax.jit(
      verbs.create_slots, static_argnums=(0, 1), out_shardings=everywhere
    ),
    prefill=jax.jit(
      functools.partial(prefill.prefill, config=config, paged=paged),
      donate_argnames="pool",
      out_shardings=split,
    ),
    insert=jax.jit(
      verbs.insert,
      donate_argnames=("pool", "slots"),
      out_shardings=(split, everywhere),
    ),
    decode=jax.jit(
      decode,
      donate_argnames=("pool", "slots"),
      out_shardings=(split, everywhere, everywhere),
    ),
    score=jax.jit(functools.partial(verbs.score, config=config)),
    switch=jax.jit(
      verbs.switch, donate_argnames="slots", out_shardings=everywhere
    ),
    read_pages=jax.jit(kv_pool.read_pages, out_shardings=split),
    write_pages=jax.jit(
      kv_pool.write_pages, donate_argnames="pool", out_shardings=split
    ),
  )


class Engine:
  """The verbs, compiled for one model on one mesh.

  What the host has to say goes into a call as numpy arrays: JAX places them in
  less time than `device_put` takes (on two busy CPU cores 0.1 ms for 0.7 ms, of
  the arrays of `insert`).

  Shapes are static: prefill is compiled once, on CPUs once more for short
  prompts, other verbs once for each number of slots, score for each bucket of
  lengths, reading and writing pages for each power of two, and never again for
  other requests or other versions.

  Attributes:
    page_size: token positions of a page.
    prefill_sizes: how prefill is cut up.
  """

  def __init__(
    self,
    *,
    mesh: Mesh,
    config: transformer.ModelConfig,
    paged: base.PagedAttention,
    page_size: int,
    max_length: int,
    prefill_chunk: int,
    chunk_steps: int,
    stop_ids: Sequence[int],
    seed: int,
  ):
    platform = mesh.devices.flat[0].platform
    self.page_size = page_size
    self.prefill_sizes = prefill.choose_sizes(
      page_size=page_size,
      prefill_chunk=prefill_chunk,
      max_length=max_length,
      platform=platform,
    )
    self._unstacks = platform == "cpu"
    # Outputs that are split over devices would have to change places.
    self._joins = self._unstacks and mesh.size == 1
    self._max_length = max_length
    self._bucket_pages = max(_BUCKET_TOKENS // page_size, 1)
    num_buckets = pages.num_pages_for(
      max_length, self._bucket_pages * page_size
    )
    self._table_width = num_buckets * self._bucket_pages
    self._everywhere = NamedSharding(mesh, PartitionSpec())
    self._split = paged.sharding(mesh)
    self._seed_key = jax.device_put(jax.random.key(seed), self._everywhere)
    self._compiled = jit_verbs(
      mesh, config, paged, chunk_steps, tuple(stop_ids)
    )

  def _bucket(self, num_tokens: int) -> int:
    """Pages to pad so many tokens to: 64, 128, ... tokens, or a whole table."""
    num_buckets = pages.num_pages_for(
      num_tokens, self._bucket_pages * self.page_size
    )
    bucket = self._bucket_pages << max(num_buckets - 1, 0).bit_length()
    return min(bucket, self._table_width)

  def arrange(self, params: interfaces.Params) -> interfaces.Params:
    """Params as it reads them the fastest; those that are so stay themselves.

    What versions share is arranged once, before they are made of it.
    """
    if self._unstacks and not isinstance(params["blocks"], list):
      return layer_list.unstack(params)
    return params

  def serve(self, version: int, params: interfaces.Params) -> verbs.Served:
    """Binds params, which must be on the mesh, to their version."""
    mesh_devices = self._everywhere.device_set
    for path, leaf in jax.tree.leaves_with_path(params):
      placed = leaf.devices() if isinstance(leaf, jax.Array) else set()
      if placed != mesh_devices:
        raise ValueError(
          f"params{jax.tree_util.keystr(path)} of version {version} is on "
          f"{placed or 'the host'}, but the generator's mesh is "
          f"{mesh_devices}: reshard it there first."
        )
    params = self.arrange(params)
    if self._joins:
      params = layer_list.join(params)
    stamp = jax.device_put(np.int32(version), self._everywhere)
    return verbs.Served(version=stamp, params=params)

  def create_slots(self, num_slots: int) -> verbs.Slots:
    """A decode batch without requests."""
    return self._compiled.create_slots(num_slots, self._table_width)

  def prefill(
    self,
    served: verbs.Served,
    pool: kv_pool.KvPool,
    blocks: Sequence[prefill.Block],
  ) -> kv_pool.KvPool:
    """Writes the KV of some blocks into their pages.

    Args:
      served: the params.
      pool: donated.
      blocks: at most prefill_sizes.call_blocks; what those of a sequence need
        of it is prefilled or comes before them.

    Returns:
      The pool with those pages written.
    """
    calls = prefill.gather(
      blocks, sizes=self.prefill_sizes, page_size=self.page_size
    )
    for call in calls:
      pool = self._compiled.prefill(served.params, pool, call)
    return pool

  def insert(
    self, pool: kv_pool.KvPool, slots: verbs.Slots, entries: Sequence[Entry]
  ) -> tuple[kv_pool.KvPool, verbs.Slots]:
    """Puts requests, whose prompts are prefilled, into slots.

    Args:
      pool: donated.
      slots: donated.
      entries: the requests.

    Returns:
      Pool and slots.
    """
    new = self._gather_entries(slots.token_B.shape[0], entries)
    return self._compiled.insert(pool, slots, self._seed_key, new)

  def switch(
    self, slots: verbs.Slots, meant: Sequence[int], *, is_active: bool
  ) -> verbs.Slots:
    """Pauses these slots, or resumes them where they were.

    Args:
      slots: donated.
      meant: numbers of slots that have a request.
      is_active: whether they are decoded from now on.

    Returns:
      The slots.
    """
    is_meant_B = np.zeros(slots.token_B.shape[0], np.bool_)
    is_meant_B[list(meant)] = True
    return self._compiled.switch(slots, is_meant_B, np.bool_(is_active))

  def read_pages(
    self, pool: kv_pool.KvPool, page_ids: Sequence[int]
  ) -> kv_pool.KvPool:
    """The KV of these pages and, up to a power of two, of the trash page."""
    width = 1 << (len(page_ids) - 1).bit_length()
    page_ids_C = np.full(width, pages.TRASH_PAGE, np.int32)
    page_ids_C[: len(page_ids)] = page_ids
    return self._compiled.read_pages(pool, page_ids_C)

  def carry(self, kv: kv_pool.KvPool) -> kv_pool.KvPool:
    """Brings pages that `read_pages` gave, here or elsewhere, to this mesh."""
    return jax.device_put(kv, self._split)

  def write_pages(
    self,
    pool: kv_pool.KvPool,
    carried: kv_pool.KvPool,
    page_ids: Sequence[int],
  ) -> kv_pool.KvPool:
    """Puts carried pages into the pool; those for the trash page are lost.

    Args:
      pool: donated.
      carried: what `read_pages` gave.
      page_ids: where its first pages go; those left over go to the trash.

    Returns:
      The pool with those pages written.
    """
    page_ids_C = np.full(carried.num_pages, pages.TRASH_PAGE, np.int32)
    page_ids_C[: len(page_ids)] = page_ids
    return self._compiled.write_pages(pool, self.carry(carried), page_ids_C)

  def _gather_entries(
    self, num_slots: int, entries: Sequence[Entry]
  ) -> verbs.Entries:
    zeros_B = np.zeros(num_slots, np.int32)
    copies = [
      (entry.copied_from, entry.page_ids[entry.position // self.page_size])
      for entry in entries
      if entry.copied_from is not None
    ]
    new = verbs.Entries(
      page_table_BC=np.zeros((num_slots, self._table_width), np.int32),
      token_B=zeros_B.copy(),
      position_B=zeros_B.copy(),
      last_position_B=zeros_B.copy(),
      rules=sampling.Rules(
        temperature_B=np.zeros(num_slots, np.float32),
        top_k_B=zeros_B.copy(),
        top_p_B=np.ones(num_slots, np.float32),
        min_p_B=np.zeros(num_slots, np.float32),
      ),
      stop_ids_BE=np.full((num_slots, verbs.MAX_STOP_IDS), -1, np.int32),
      draw_B3=np.zeros((num_slots, 3), np.int32),
      is_new_B=np.zeros(num_slots, np.bool_),
      copies_B2=np.zeros((num_slots, 2), np.int32),
      num_copies=np.int32(len(copies)),
    )
    new.copies_B2[: len(copies)] = np.reshape(copies, (-1, 2))
    for entry in entries:
      new.page_table_BC[entry.slot, : len(entry.page_ids)] = entry.page_ids
      new.token_B[entry.slot] = entry.token
      new.position_B[entry.slot] = entry.position
      new.last_position_B[entry.slot] = entry.last_position
      new.rules.temperature_B[entry.slot] = entry.sampling.temperature
      new.rules.top_k_B[entry.slot] = entry.sampling.top_k
      new.rules.top_p_B[entry.slot] = entry.sampling.top_p
      new.rules.min_p_B[entry.slot] = entry.sampling.min_p
      new.stop_ids_BE[entry.slot, : len(entry.stop_ids)] = entry.stop_ids
      new.draw_B3[entry.slot] = entry.draw
      new.is_new_B[entry.slot] = True
    return new

  def decode(
    self,
    served: verbs.Served,
    pool: kv_pool.KvPool,
    slots: verbs.Slots,
    *,
    enough_ended: int,
  ) -> tuple[kv_pool.KvPool, verbs.Slots, Int[jax.Array, "T F B"]]:
    """Samples a chunk of tokens for each active slot.

    Args:
      served: the params.
      pool: donated.
      slots: donated.
      enough_ended: slots that end in the chunk before it ends early.

    Returns:
      Pool, slots, and what was sampled, for `verbs.unpack_chunk`.
    """
    return self._compiled.decode(served, pool, slots, np.int32(enough_ended))

  def score(
    self, served: verbs.Served, tokens: Int[np.ndarray, "T"]
  ) -> Float[np.ndarray, "S"]:
    """Log-probability in nats of each token but the first, at temperature 1.

    The canary of a publish: the trainer's own must be equal to it.
    """
    if not 2 <= len(tokens) <= self._max_length:
      raise ValueError(
        f"Scoring takes 2 to {self._max_length} tokens, not {len(tokens)}: "
        "change config.generator.max_length."
      )
    width = self._bucket(len(tokens))
    tokens_T = np.zeros(width * self.page_size, np.int32)
    tokens_T[: len(tokens)] = tokens
    logprobs_T = self._compiled.score(
      served.params, tokens_T, np.int32(len(tokens))
    )
    return jax.device_get(logprobs_T)[1 : len(tokens)]
