"""The GPU kernel, in Triton: attention of tokens to their sequence's pages.

A program takes one block of query tokens of one sequence, one KV head, and one
part of the pages up to them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from dora_jax.generator.attention import products

# The least rows and columns that a tensor core multiplies.
LEAST_TILE = 16
# Rows of queries that a program takes in prefill: more would spill registers.
_MOST_ROWS = 64
# Programs that share a sequence in decoding. With more, few slots still fill
# the device, and long requests take no longer than short ones; with fewer, less
# is summed.
_NUM_SPLITS = 8
# Finite, so that no difference of two of them is NaN.
_MASKED = -1e30


def attend_pages(
  query_BTKGH: Float[Array, "B T K G H"],
  key_LJKOH: Float[Array, "L J K O H"],
  value_LJKOH: Float[Array, "L J K O H"],
  page_table_BC: Int[Array, "B C"],
  start_B: Int[Array, "B"],
  layer_1: Int[Array, "1"],
  *,
  interpret: bool,
) -> Float[Array, "B T K G H"]:
  """Softmax attention of tokens up to themselves, on one device.

  The tokens of a row are parted into blocks, each of which the kernel sees as a
  row of its own.
  """
  num_rows, num_tokens, num_heads, num_queries, width = query_BTKGH.shape
  block_tokens = num_tokens
  while block_tokens * num_queries > _MOST_ROWS and block_tokens % 2 == 0:
    block_tokens //= 2
  num_blocks = num_tokens // block_tokens
  blocks = (num_rows * num_blocks, block_tokens, num_heads, num_queries, width)
  start_BN = start_B[:, None] + block_tokens * jnp.arange(num_blocks)[None]
  out_BTKGH = _attend_blocks(
    query_BTKGH.reshape(blocks),
    key_LJKOH,
    value_LJKOH,
    jnp.repeat(page_table_BC, num_blocks, axis=0),
    start_BN.reshape(-1),
    layer_1,
    # Only decoding has too few rows to fill a device.
    num_splits=_NUM_SPLITS if num_tokens == 1 else 1,
    interpret=interpret,
  )
  return out_BTKGH.reshape(query_BTKGH.shape)


def _attend_blocks(
  query_BTKGH: Float[Array, "B T K G H"],
  key_LJKOH: Float[Array, "L J K O H"],
  value_LJKOH: Float[Array, "L J K O H"],
  page_table_BC: Int[Array, "B C"],
  start_B: Int[Array, "B"],
  layer_1: Int[Array, "1"],
  *,
  num_splits: int,
  interpret: bool,
) -> Float[Array, "B T K G H"]:
  """Runs a program for each block, KV head and part Z of a sequence.

  Each gives the maximum m, sum and weighted sum of its part, all fp32; here
  they are scaled by exp(m - max(m)) and added up.
  """
  num_rows, num_tokens, num_heads, num_queries, width = query_BTKGH.shape
  used = num_tokens * num_queries
  tile = max(1 << (used - 1).bit_length(), LEAST_TILE)
  query_BKQH = jnp.moveaxis(query_BTKGH, 2, 1).reshape(
    num_rows, num_heads, used, width
  )
  grid = (num_rows, num_heads, num_splits)
  sums = lambda *sizes: (
    jax.ShapeDtypeStruct((*grid, tile, *sizes), jnp.float32),
    pl.BlockSpec(
      (None, None, None, tile, *sizes),
      lambda row, head, split: (row, head, split, 0, *(0 for _ in sizes)),
    ),
  )
  max_shape, max_block = sums()
  out_shape, out_block = sums(width)
  max_BKZQ, total_BKZQ, out_BKZQH = pl.pallas_call(
    functools.partial(
      _attend_part, num_tokens=num_tokens, num_queries=num_queries
    ),
    grid=grid,
    in_specs=[
      pl.BlockSpec(
        (None, None, tile, width), lambda row, head, split: (row, head, 0, 0)
      ),
      *(pl.BlockSpec() for _ in range(5)),
    ],
    out_specs=(max_block, max_block, out_block),
    out_shape=(max_shape, max_shape, out_shape),
    compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
    name="paged_attention",
  )(
    jnp.pad(query_BKQH, [(0, 0), (0, 0), (0, tile - used), (0, 0)]).astype(
      key_LJKOH.dtype
    ),
    key_LJKOH,
    value_LJKOH,
    page_table_BC,
    start_B,
    layer_1,
  )
  scale_BKZQ = jnp.exp(max_BKZQ - max_BKZQ.max(axis=2, keepdims=True))
  total_BKQ = (total_BKZQ * scale_BKZQ).sum(axis=2)
  out_BKQH = (out_BKZQH * scale_BKZQ[..., None]).sum(axis=2)
  out_BKQH = (out_BKQH / total_BKQ[..., None])[:, :, :used]
  out_BKTGH = out_BKQH.reshape(
    num_rows, num_heads, num_tokens, num_queries, width
  )
  return jnp.moveaxis(out_BKTGH, 1, 2).astype(query_BTKGH.dtype)


def _attend_part(
  query_ref,  # [Q, H], of this block and KV head: T * G rows, then padding
  key_ref,  # [L, J, K, O, H]
  value_ref,  # [L, J, K, O, H]
  table_ref,  # [B, C]
  start_ref,  # [B]
  layer_ref,  # [1]
  max_ref,  # [Q], of this block, KV head and part
  total_ref,  # [Q]
  out_ref,  # [Q, H]
  *,
  num_tokens: int,
  num_queries: int,
):
  """One program: the pages of one part of a sequence, one after the other."""
  row, head, split = (pl.program_id(axis) for axis in range(3))
  page_size = key_ref.shape[3]
  start, layer = start_ref[row], layer_ref[0]
  end = start + num_tokens
  num_columns = pl.cdiv(end, page_size)
  part_columns = pl.cdiv(num_columns, pl.num_programs(2))
  first = split * part_columns
  query_QH = query_ref[...]
  num_rows, width = query_QH.shape
  position_Q = start + jnp.arange(num_rows) // num_queries

  def attend_page(column, sums):
    max_Q, total_Q, out_QH = sums
    page = table_ref[row, column]
    key_OH = key_ref[layer, page, head]
    value_OH = value_ref[layer, page, head]
    position_O = column * page_size + jnp.arange(page_size)
    scores_QO = products.dot(query_QH, key_OH, contracting=1) * width**-0.5
    seen_QO = position_O[None] <= position_Q[:, None]
    scores_QO = jnp.where(seen_QO, scores_QO, _MASKED)
    # What a former request left there may be NaN, which 0 * NaN would let pass.
    value_OH = jnp.where(
      (position_O < end)[:, None], value_OH, jnp.zeros_like(value_OH)
    )
    new_max_Q = jnp.maximum(max_Q, scores_QO.max(axis=1))
    scale_Q = jnp.exp(max_Q - new_max_Q)
    weights_QO = jnp.exp(scores_QO - new_max_Q[:, None])
    add_QH = products.dot(
      weights_QO.astype(value_OH.dtype), value_OH, contracting=0
    )
    return (
      new_max_Q,
      total_Q * scale_Q + weights_QO.sum(axis=1),
      out_QH * scale_Q[:, None] + add_QH,
    )

  # What is added before a row has seen anything weighs exp(_MASKED) later: 0.
  nothing = (
    jnp.full((num_rows,), _MASKED, jnp.float32),
    jnp.zeros((num_rows,), jnp.float32),
    jnp.zeros((num_rows, width), jnp.float32),
  )
  last = jnp.minimum(first + part_columns, num_columns)
  max_Q, total_Q, out_QH = jax.lax.fori_loop(first, last, attend_page, nothing)
  max_ref[...] = max_Q
  total_ref[...] = total_Q
  out_ref[...] = out_QH
