"""One layer of random tokens, attended to over the pages of any attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.model import transformer

LAYER = 1
TABLE_WIDTH = 4


def make_config(*, num_kv_heads=2, num_queries=2, head_width=128):
  """A model of two layers, of which only the heads matter here."""
  return transformer.ModelConfig(
    vocab_size=8,
    width=8,
    mlp_width=8,
    num_layers=2,
    num_heads=num_kv_heads * num_queries,
    num_kv_heads=num_kv_heads,
    head_width=head_width,
    rope_theta=1e4,
    norm_eps=1e-6,
    qk_norm=False,
    qkv_bias=False,
    tied_head=True,
    max_positions=64,
  )


def draw_tokens(config, seed, num_rows, num_tokens, dtype=jnp.float32):
  """Queries, keys and values of new tokens."""
  rng = np.random.default_rng(seed)
  heads, width = config.num_kv_heads, config.head_width
  kv_shape = (num_rows, num_tokens, heads, width)
  query_shape = (num_rows, num_tokens, heads, config.num_query_groups, width)
  draw = lambda shape: jnp.asarray(rng.normal(size=shape), dtype)
  return draw(query_shape), draw(kv_shape), draw(kv_shape)


@functools.partial(jax.jit, static_argnums=0)
def prefill(paged, pool, tokens, start_R, page_table_RC, filled_RW):
  attend = paged.prefill(start_R, page_table_RC, filled_RW)
  return attend(*tokens, pool, jnp.int32(LAYER))


@functools.partial(jax.jit, static_argnums=0)
def decode(paged, pool, tokens, page_table_BC, position_B, is_active_B):
  attend = paged.decode(page_table_BC, position_B, is_active_B)
  return attend(*tokens, pool, jnp.int32(LAYER))


def answer(paged, mesh, config, *, page_size, dtype=jnp.float32):
  """What two prompts and two decode steps of each give, beside an empty slot.

  The first prompt takes one page and a bit, the second is about to begin its
  fourth page. Whatever is read before it is written is NaN.

  Returns:
    The outputs at real tokens, fp32; and the pool.
  """
  pool = paged.create_pool(
    config, mesh=mesh, num_pages=9, page_size=page_size, dtype=dtype
  )
  pool = jax.tree.map(lambda kv: kv * jnp.nan, pool)
  tables_BC = np.array([[5, 2, 8, 0], [7, 1, 4, 3], [5, 2, 8, 0]], np.int32)
  lengths = (page_size + 3, 3 * page_size)
  outputs = []
  # Blocks of two pages: both of each prompt at once, one prompt a pass.
  start_R = np.array([0, 2 * page_size], np.int32)
  for row, length in enumerate(lengths):
    tokens = draw_tokens(config, row, 2, 2 * page_size, dtype)
    is_held_C = np.arange(TABLE_WIDTH) * page_size < length
    table_C = tables_BC[row] * is_held_C
    out_RTKGH, pool = prefill(
      paged,
      pool,
      tokens,
      start_R,
      np.tile(table_C, (2, 1)),
      table_C.reshape(2, 2),
    )
    flat_TKGH = out_RTKGH.reshape(-1, *out_RTKGH.shape[2:])
    outputs.append(flat_TKGH[:length])
  position_B = np.array([*lengths, 9], np.int32)
  is_active_B = np.array([True, True, False])
  for step in range(2):
    tokens = draw_tokens(config, 10 + step, 3, 1, dtype)
    out_BTKGH, pool = decode(
      paged, pool, tokens, tables_BC, position_B + step, is_active_B
    )
    outputs.append(out_BTKGH[:2, 0])
  return [np.asarray(each, np.float32) for each in outputs], pool
