"""Attention of blocks of prompts on GPUs by cuDNN, over gathered pages.

JAX's paged attention of cuDNN takes no pool that holds more pages than the
tables of one call name, so each block's pages are copied side by side first.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Widths of tables that are compiled: the whole, half of it, and so on.
_NUM_WIDTHS = 4


def attend_blocks(
  query_RTKGH: Float[Array, "R T K G H"],
  key_LJKOH: Float[Array, "L J K O H"],
  value_LJKOH: Float[Array, "L J K O H"],
  page_table_RC: Int[Array, "R C"],
  start_R: Int[Array, "R"],
  layer_1: Int[Array, "1"],
  *,
  implementation: str,
) -> Float[Array, "R T K G H"]:
  """Softmax attention of blocks up to each token itself, on one device.

  As many pages are copied as the longest sequence has, up to a few widths. What
  a block does not see weighs nothing, however many pages there are.

  Args:
    query_RTKGH: of the blocks' tokens.
    key_LJKOH: the pool's keys, those of the blocks included.
    value_LJKOH: the pool's values.
    page_table_RC: pages of each block's sequence, in order of position.
    start_R: position of each block's first token.
    layer_1: the layer.
    implementation: of jax.nn.dot_product_attention.
  """
  num_columns, page_size = page_table_RC.shape[1], key_LJKOH.shape[3]
  end = start_R.max() + query_RTKGH.shape[1]
  widths = sorted({-(-num_columns >> shift) for shift in range(_NUM_WIDTHS)})
  return jax.lax.switch(
    (end > jnp.array(widths[:-1], jnp.int32) * page_size).sum(),
    [
      functools.partial(
        _attend_columns, num_columns=width, implementation=implementation
      )
      for width in widths
    ],
    query_RTKGH,
    key_LJKOH,
    value_LJKOH,
    page_table_RC,
    start_R,
    layer_1[0],
  )


def _attend_columns(
  query_RTKGH,
  key_LJKOH,
  value_LJKOH,
  page_table_RC,
  start_R,
  layer,
  *,
  num_columns,
  implementation,
):
  """Attention to the first pages of each sequence."""
  num_rows, num_tokens, num_heads, _, width = query_RTKGH.shape
  page_ids_RC = page_table_RC[:, :num_columns]

  def gather(pages_LJKOH):
    rows_RCKOH = pages_LJKOH[layer, page_ids_RC]
    return rows_RCKOH.swapaxes(2, 3).reshape(num_rows, -1, num_heads, width)

  key_RSKH, value_RSKH = gather(key_LJKOH), gather(value_LJKOH)
  position_11S = jnp.arange(key_RSKH.shape[1], dtype=jnp.int32)[None, None]
  offset_1T1 = jnp.arange(num_tokens, dtype=jnp.int32)[None, :, None]
  seen_RTS = position_11S <= start_R[:, None, None] + offset_1T1
  # What a former request left past the block may be NaN, which a weight of 0
  # would let pass.
  is_written_RS11 = seen_RTS[:, -1, :, None, None]
  key_RSKH, value_RSKH = (
    jnp.where(is_written_RS11, rows, 0) for rows in (key_RSKH, value_RSKH)
  )
  out_RTNH = jax.nn.dot_product_attention(
    query_RTKGH.reshape(num_rows, num_tokens, -1, width).astype(key_RSKH.dtype),
    key_RSKH,
    value_RSKH,
    mask=seen_RTS[:, None],
    implementation=implementation,
  )
  return out_RTNH.reshape(query_RTKGH.shape).astype(query_RTKGH.dtype)
