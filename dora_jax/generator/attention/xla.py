"""Attention over pages in plain XLA: for CPUs, and to measure others by."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dora_jax.generator import kv_pool
from dora_jax.generator.attention import xla_blocks, xla_pages
from dora_jax.model import attention, transformer


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
      reach = jnp.where(is_active_B, position_B, 0).max()
      out_BKGH = _attend_pages(
        query_BTKGH[:, 0], pool, layer, page_table_BC, position_B, reach
      )
      return out_BKGH[:, None].astype(query_BTKGH.dtype), pool

    return attend


def _attend_pages(
  query_BKGH: Float[Array, "B K G H"],
  pool: kv_pool.KvPool,
  layer: Int[Array, ""],
  page_table_BC: Int[Array, "B C"],
  position_B: Int[Array, "B"],
  reach: Int[Array, ""],
) -> Float[Array, "B K G H"]:
  """Softmax attention over positions up to one's own, page after page.

  Keeps the running maximum m, sum of weights and weighted sum of values, all
  fp32: a page with maximum m' scales the sums so far by exp(m - max(m, m')).

  Pages have one shape and a page that a slot does not reach changes its sums by
  not a bit. So the cost follows the longest request of the batch, without
  compiling for it, and yet what a request samples does not depend on it, as it
  would if the length of a reduction, hence its order, did.
  Source: Milakov and Gimelshein (https://arxiv.org/abs/1805.02867).
  """
  num_slots, num_heads, num_queries, head_width = query_BKGH.shape
  page_size = xla_pages.page_size_of(pool)

  def attend_page(column, sums):
    max_BKG1, total_BKG1, out_BKGH = sums
    page_B = jax.lax.dynamic_index_in_dim(
      page_table_BC, column, axis=1, keepdims=False
    )
    key_BKHO, value_BKOH = xla_pages.read_pages(pool, layer, page_B)
    position_O = column * page_size + jnp.arange(page_size)
    seen_BO = position_O[None] <= position_B[:, None]
    scores_BKGO = jnp.einsum(
      "BKGH,BKHO->BKGO",
      query_BKGH.astype(key_BKHO.dtype),
      key_BKHO,
      preferred_element_type=jnp.float32,
    )
    scores_BKGO = jnp.where(
      seen_BO[:, None, None], scores_BKGO * head_width**-0.5, -jnp.inf
    )
    new_max_BKG1 = jnp.maximum(
      max_BKG1, scores_BKGO.max(axis=-1, keepdims=True)
    )
    scale_BKG1 = jnp.exp(max_BKG1 - new_max_BKG1)
    weights_BKGO = jnp.exp(scores_BKGO - new_max_BKG1)
    # Pages are handed on without being wiped: a NaN that an earlier request
    # left where this one has not written yet must not pass through 0 * NaN.
    value_BKOH = jnp.where(seen_BO[:, None, :, None], value_BKOH, 0)
    add_BKGH = jnp.einsum(
      "BKGO,BKOH->BKGH",
      weights_BKGO.astype(value_BKOH.dtype),
      value_BKOH,
      preferred_element_type=jnp.float32,
    )
    total_BKG1 = total_BKG1 * scale_BKG1 + weights_BKGO.sum(-1, keepdims=True)
    return new_max_BKG1, total_BKG1, out_BKGH * scale_BKG1 + add_BKGH

  # Every slot sees position 0, so after the first page each maximum is finite.
  blank_BKG1 = jnp.zeros((num_slots, num_heads, num_queries, 1), jnp.float32)
  start = (
    blank_BKG1 - jnp.inf,
    blank_BKG1,
    jnp.zeros_like(query_BKGH, jnp.float32),
  )
  num_columns = reach // page_size + 1
  _, total_BKG1, out_BKGH = jax.lax.fori_loop(
    0, num_columns, attend_page, start
  )
  return out_BKGH / total_BKG1
