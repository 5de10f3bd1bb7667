"""Attention over pages in plain XLA: for CPUs, and to measure others by."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dora_jax.generator import kv_pool
from dora_jax.generator.attention import xla_blocks, xla_pages
from dora_jax.model import attention, transformer

# Of the slots, for how many at least a page is read at once. With more, short
# requests take longer beside long ones; with fewer, starting a product takes
# longer than computing it.
_LEAST_SHARE = 4


@dataclasses.dataclass(frozen=True)
class XlaAttention:
  """Reads a page of each slot after the other; see `xla_pages`."""

  name: str = "xla"

  def find_obstacle(
    self,
    config: transformer.ModelConfig,
    *,
    page_size: int,
    dtype: DTypeLike,
  ) -> str | None:
    """There is none: it serves all."""
    del config, page_size, dtype
    return None

  def create_pool(
    self,
    config: transformer.ModelConfig,
    *,
    mesh: Mesh,
    num_pages: int,
    page_size: int,
    dtype: DTypeLike,
  ) -> kv_pool.KvPool:
    """Makes a pool of zeros in its place, never whole on one device."""
    return xla_pages.create_pool(
      config,
      where=self.sharding(mesh),
      num_pages=num_pages,
      page_size=page_size,
      dtype=dtype,
    )

  def sharding(self, mesh: Mesh) -> NamedSharding:
    """KV heads are split over the tensor axis; all else is everywhere."""
    return NamedSharding(mesh, PartitionSpec(None, None, "tensor"))

  def prefill(
    self,
    start_R: Int[Array, "R"],
    page_table_RC: Int[Array, "R C"],
    filled_RW: Int[Array, "R W"],
  ) -> attention.Attend:
    """Attention of blocks to all before them, which also fills their pages."""
    return xla_blocks.block_attention(start_R, page_table_RC, filled_RW)

  def decode(
    self,
    page_table_BC: Int[Array, "B C"],
    position_B: Int[Array, "B"],
    is_active_B: Bool[Array, "B"],
  ) -> attention.Attend:
    """Attention of one new token a slot over the pages of its request."""

    # Alike for all layers: longest first, those without a request last.
    num_tokens_B = jnp.where(is_active_B, position_B + 1, 0)
    order_B = jnp.argsort(-num_tokens_B)
    table_BC, sorted_B = page_table_BC[order_B], num_tokens_B[order_B]

    def attend(query_BTKGH, key_BTKH, value_BTKH, pool, layer):
      page_size = xla_pages.page_size_of(pool)
      column_B = position_B // page_size
      page_B = kv_pool.page_at(page_table_BC, column_B, is_active_B)
      pool = xla_pages.write_tokens(
        pool,
        layer,
        page_B,
        position_B % page_size,
        key_BTKH[:, 0],
        value_BTKH[:, 0],
      )
      query_BKGH = query_BTKGH[order_B, 0]
      out_BKGH = _attend_pages(query_BKGH, pool, layer, table_BC, sorted_B)
      out_BKGH = (
        jnp.zeros_like(out_BKGH).at[order_B].set(out_BKGH, unique_indices=True)
      )
      return out_BKGH[:, None].astype(query_BTKGH.dtype), pool

    return attend


# Running maximum of the scores, sum of the weights, weighted sum of the values.
_Sums = tuple[
  Float[Array, "B K G 1"], Float[Array, "B K G 1"], Float[Array, "B K G H"]
]


def _attend_pages(
  query_BKGH: Float[Array, "B K G H"],
  pool: kv_pool.KvPool,
  layer: Int[Array, ""],
  page_table_BC: Int[Array, "B C"],
  num_tokens_B: Int[Array, "B"],
) -> Float[Array, "B K G H"]:
  """Softmax attention over so many tokens of each slot, page after page.

  The longest come first. So the slots that reach a page are the first few, and
  it is read for little more than these: the cost follows the pages in use,
  without compiling for them. And yet what a request samples does not depend on
  others: pages have one shape, and one that a slot does not reach changes its
  sums by not a bit.
  """
  num_slots, num_heads, num_queries, _ = query_BKGH.shape
  page_size = xla_pages.page_size_of(pool)
  widths = sorted(
    {-(-num_slots >> shift) for shift in range(_LEAST_SHARE.bit_length())}
  )

  def attend_column(column, sums):
    page_B = jax.lax.dynamic_index_in_dim(
      page_table_BC, column, axis=1, keepdims=False
    )
    # Every slot sees position 0, so that its maximum is finite from there on.
    last_B = jnp.maximum(num_tokens_B - 1, 0) - column * page_size

    def attend_first(width, sums):
      first = lambda rows_B: rows_B[:width]
      new = _attend_page(
        first(query_BKGH),
        *xla_pages.read_pages(pool, layer, first(page_B)),
        first(last_B),
        jax.tree.map(first, sums),
      )
      return jax.tree.map(lambda old, new: old.at[:width].set(new), sums, new)

    num_reaching = (num_tokens_B > column * page_size).sum()
    return jax.lax.switch(
      (num_reaching > jnp.array(widths[:-1], jnp.int32)).sum(),
      [functools.partial(attend_first, width) for width in widths],
      sums,
    )

  blank_BKG1 = jnp.zeros((num_slots, num_heads, num_queries, 1), jnp.float32)
  start = (
    blank_BKG1 - jnp.inf,
    blank_BKG1,
    jnp.zeros_like(query_BKGH, jnp.float32),
  )
  num_columns = -(-num_tokens_B[0] // page_size)
  _, total_BKG1, out_BKGH = jax.lax.fori_loop(
    0, num_columns, attend_column, start
  )
  # A slot without a request may have seen nothing at all.
  return out_BKGH / jnp.where(total_BKG1 == 0, 1.0, total_BKG1)


def _attend_page(
  query_BKGH: Float[Array, "B K G H"],
  key_BKHO: Float[Array, "B K H O"],
  value_BKOH: Float[Array, "B K O H"],
  last_B: Int[Array, "B"],
  sums: _Sums,
) -> _Sums:
  """Adds a page of each slot, up to its last token, to the sums, in fp32.

  A page with maximum m' scales the sums so far by exp(m - max(m, m')).
  Source: Milakov and Gimelshein (https://arxiv.org/abs/1805.02867).
  """
  max_BKG1, total_BKG1, out_BKGH = sums
  seen_BO = jnp.arange(key_BKHO.shape[-1])[None] <= last_B[:, None]
  scores_BKGO = jnp.einsum(
    "BKGH,BKHO->BKGO",
    query_BKGH.astype(key_BKHO.dtype),
    key_BKHO,
    preferred_element_type=jnp.float32,
  )
  scores_BKGO = jnp.where(
    seen_BO[:, None, None],
    scores_BKGO * query_BKGH.shape[-1] ** -0.5,
    -jnp.inf,
  )
  new_max_BKG1 = jnp.maximum(max_BKG1, scores_BKGO.max(axis=-1, keepdims=True))
  scale_BKG1 = jnp.exp(max_BKG1 - new_max_BKG1)
  weights_BKGO = jnp.exp(scores_BKGO - new_max_BKG1)
  # Pages are handed on without being wiped: a NaN that an earlier request left
  # where this one has not written yet must not pass through 0 * NaN.
  value_BKOH = jnp.where(seen_BO[:, None, :, None], value_BKOH, 0)
  add_BKGH = jnp.einsum(
    "BKGO,BKOH->BKGH",
    weights_BKGO.astype(value_BKOH.dtype),
    value_BKOH,
    preferred_element_type=jnp.float32,
  )
  total_BKG1 = total_BKG1 * scale_BKG1 + weights_BKGO.sum(-1, keepdims=True)
  return new_max_BKG1, total_BKG1, out_BKGH * scale_BKG1 + add_BKGH
