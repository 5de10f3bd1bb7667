"""The KV pool on a mesh: its pages, and attention that reads and fills them."""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dora_jax.generator import pages
from dora_jax.model import attention, transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KvPool:
  """Keys and values of all live requests of a mesh, in pages.

  The pages of one request, taken out of a pool, have the same form.

  Attributes:
    key_LJOKH: keys, after rotary embedding.
    value_LJOKH: values.
  """

  key_LJOKH: Any
  value_LJOKH: Any


@dataclasses.dataclass(kw_only=True)
class SharedPool:
  """The one KV pool of a mesh, which its lanes hand to each other.

  Attributes:
    kv: the pages themselves; replaced by each verb, which consumes it.
    allocator: who holds which page.
    num_serving: version -> lanes that serve it.
  """

  kv: KvPool
  allocator: pages.PageAllocator
  num_serving: collections.Counter[int] = dataclasses.field(
    default_factory=collections.Counter
  )

  def serve(self, version: int) -> None:
    """A lane serves this version from now on."""
    self.num_serving[version] += 1

  def unserve(self, version: int) -> None:
    """A lane serves it no more; after the last, nothing of it is found."""
    self.num_serving[version] -= 1
    if not self.num_serving[version]:
      del self.num_serving[version]
      self.allocator.drop(version)


# Tokens that decoding attends to at once. Fewer waste less past the end of a
# request, more make fewer and larger products.
_TILE_TOKENS = 64


def num_tile_pages(page_size: int) -> int:
  """Pages of a tile; the width of a page table must be a multiple of it."""
  return max(_TILE_TOKENS // page_size, 1)


def pool_sharding(mesh: Mesh) -> NamedSharding:
  """KV heads are split over the tensor axis; all else is on every device."""
  return NamedSharding(mesh, PartitionSpec(None, None, None, "tensor", None))


def create_pool(
  config: transformer.ModelConfig,
  *,
  mesh: Mesh,
  num_pages: int,
  page_size: int,
  dtype: DTypeLike,
) -> KvPool:
  """Makes a pool of zeros in its place, never whole on one device."""
  shape = (
    config.num_layers,
    num_pages,
    page_size,
    config.num_kv_heads,
    config.head_width,
  )
  where = pool_sharding(mesh)
  return KvPool(
    key_LJOKH=jnp.zeros(shape, dtype, device=where),
    value_LJOKH=jnp.zeros(shape, dtype, device=where),
  )


def copy_pages(
  pool: KvPool, copies_B2: Int[Array, "B 2"], num_copies: Int[Array, ""]
) -> KvPool:
  """Copies the pages of the first num_copies rows, all layers of each."""

  def copy(row, pool):
    source, target = copies_B2[row]
    return jax.tree.map(lambda kv: kv.at[:, target].set(kv[:, source]), pool)

  return jax.lax.fori_loop(0, num_copies, copy, pool)


def read_pages(pool: KvPool, page_ids_C: Int[Array, "C"]) -> KvPool:
  """The KV of some pages, all layers of each, in the order asked for."""
  return jax.tree.map(lambda kv: kv[:, page_ids_C], pool)


def write_pages(
  pool: KvPool, carried: KvPool, page_ids_C: Int[Array, "C"]
) -> KvPool:
  """Puts what `read_pages` gave into these pages; the trash page may repeat."""
  return jax.tree.map(
    lambda kv, pages_of: kv.at[:, page_ids_C].set(pages_of), pool, carried
  )


def write_layer(
  pool: KvPool,
  layer: Int[Array, ""],
  page_ids_C: Int[Array, "C"],
  key_SKH: Float[Array, "S K H"],
  value_SKH: Float[Array, "S K H"],
) -> KvPool:
  """Fills pages with one layer's KV of as many tokens as they take.

  Args:
    pool: the pool.
    layer: the layer.
    page_ids_C: the pages; the trash page may repeat.
    key_SKH: keys of all of them, in order.
    value_SKH: values.
  """

  def write(pages_LJOKH, rows_SKH):
    rows_COKH = rows_SKH.reshape(page_ids_C.shape[0], -1, *rows_SKH.shape[1:])
    rows_COKH = rows_COKH.astype(pages_LJOKH.dtype)
    return pages_LJOKH.at[layer, page_ids_C].set(rows_COKH)

  return KvPool(
    key_LJOKH=write(pool.key_LJOKH, key_SKH),
    value_LJOKH=write(pool.value_LJOKH, value_SKH),
  )


def read_layer(
  pool: KvPool, layer: Int[Array, ""], page_ids_C: Int[Array, "C"]
) -> tuple[Float[Array, "S K H"], Float[Array, "S K H"]]:
  """One layer's keys and values of all tokens of some pages, in order."""

  def read(pages_LJOKH):
    rows_COKH = pages_LJOKH[layer, page_ids_C]
    return rows_COKH.reshape(-1, *rows_COKH.shape[2:])

  return read(pool.key_LJOKH), read(pool.value_LJOKH)


def decode_attention(
  page_table_BC: Int[Array, "B C"],
  position_B: Int[Array, "B"],
  is_active_B: Bool[Array, "B"],
) -> attention.Attend:
  """Attention of one new token a slot over the pages of its request.

  Args:
    page_table_BC: the pages of each slot in order of position.
    position_B: position of the new token; it sees itself and all before it.
    is_active_B: whether the slot has a request; if not it writes to page 0.

  Returns:
    The callback that the model's forward pass takes as `attend`.
  """

  def write(pages_LJOKH, rows_BTKH, layer):
    page_size = pages_LJOKH.shape[2]
    column_B1 = position_B[:, None] // page_size
    page_B = jnp.take_along_axis(page_table_BC, column_B1, axis=1)[:, 0]
    page_B = jnp.where(is_active_B, page_B, pages.TRASH_PAGE)
    rows_BKH = rows_BTKH[:, 0].astype(pages_LJOKH.dtype)
    return pages_LJOKH.at[layer, page_B, position_B % page_size].set(rows_BKH)

  def attend(query_BTKGH, key_BTKH, value_BTKH, pool, layer):
    pool = KvPool(
      key_LJOKH=write(pool.key_LJOKH, key_BTKH, layer),
      value_LJOKH=write(pool.value_LJOKH, value_BTKH, layer),
    )
    reach = jnp.where(is_active_B, position_B, 0).max()
    out_BKGH = _attend_tiles(
      query_BTKGH[:, 0], pool, layer, page_table_BC, position_B, reach
    )
    return out_BKGH[:, None].astype(query_BTKGH.dtype), pool

  return attend


def _attend_tiles(
  query_BKGH: Float[Array, "B K G H"],
  pool: KvPool,
  layer: Int[Array, ""],
  page_table_BC: Int[Array, "B C"],
  position_B: Int[Array, "B"],
  reach: Int[Array, ""],
) -> Float[Array, "B K G H"]:
  """Softmax attention over positions up to one's own, tile after tile.

  Keeps the running maximum m, sum of weights and weighted sum of values, all
  fp32: a tile with maximum m' scales the sums so far by exp(m - max(m, m')).

  Tiles have one shape and a tile that a slot does not reach changes its sums by
  not a bit. So the cost follows the longest request of the batch, without
  compiling for it, and yet what a request samples does not depend on it, as it
  would if the length of a reduction, hence its order, did.
  Source: Milakov and Gimelshein (https://arxiv.org/abs/1805.02867).
  """
  num_slots, num_heads, num_queries, head_width = query_BKGH.shape
  page_size = pool.key_LJOKH.shape[2]
  tile_pages = num_tile_pages(page_size)
  tile_size = tile_pages * page_size

  def read(pages_LJOKH, page_ids_BC):
    tile_BCOKH = pages_LJOKH[layer, page_ids_BC]
    return tile_BCOKH.reshape(num_slots, tile_size, num_heads, head_width)

  def attend_tile(tile, sums):
    max_BKG1, total_BKG1, out_BKGH = sums
    page_ids_BC = jax.lax.dynamic_slice_in_dim(
      page_table_BC, tile * tile_pages, tile_pages, axis=1
    )
    key_BSKH = read(pool.key_LJOKH, page_ids_BC)
    value_BSKH = read(pool.value_LJOKH, page_ids_BC)
    position_S = tile * tile_size + jnp.arange(tile_size)
    seen_BS = position_S[None] <= position_B[:, None]
    seen_BKGS = seen_BS[:, None, None]
    scores_BKGS = jnp.einsum(
      "BKGH,BSKH->BKGS",
      query_BKGH.astype(key_BSKH.dtype),
      key_BSKH,
      preferred_element_type=jnp.float32,
    )
    scores_BKGS = jnp.where(seen_BKGS, scores_BKGS * head_width**-0.5, -jnp.inf)
    new_max_BKG1 = jnp.maximum(
      max_BKG1, scores_BKGS.max(axis=-1, keepdims=True)
    )
    scale_BKG1 = jnp.exp(max_BKG1 - new_max_BKG1)
    weights_BKGS = jnp.exp(scores_BKGS - new_max_BKG1)
    # Pages are handed on without being wiped: a NaN that an earlier request
    # left where this one has not written yet must not pass through 0 * NaN.
    value_BSKH = jnp.where(seen_BS[:, :, None, None], value_BSKH, 0)
    add_BKGH = jnp.einsum(
      "BKGS,BSKH->BKGH",
      weights_BKGS.astype(value_BSKH.dtype),
      value_BSKH,
      preferred_element_type=jnp.float32,
    )
    total_BKG1 = total_BKG1 * scale_BKG1 + weights_BKGS.sum(-1, keepdims=True)
    return new_max_BKG1, total_BKG1, out_BKGH * scale_BKG1 + add_BKGH

  # Every slot sees position 0, so after the first tile each maximum is finite.
  blank_BKG1 = jnp.zeros((num_slots, num_heads, num_queries, 1), jnp.float32)
  start = (
    blank_BKG1 - jnp.inf,
    blank_BKG1,
    jnp.zeros_like(query_BKGH, jnp.float32),
  )
  num_tiles = reach // tile_size + 1
  _, total_BKG1, out_BKGH = jax.lax.fori_loop(0, num_tiles, attend_tile, start)
  return out_BKGH / total_BKG1
