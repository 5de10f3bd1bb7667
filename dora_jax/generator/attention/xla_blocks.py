"""Attention of blocks of prompts in plain XLA; see `xla_pages`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dora_jax.generator import kv_pool
from dora_jax.generator.attention import xla_pages
from dora_jax.model import attention


def block_attention(
  start_R: Int[Array, "R"],
  page_table_RC: Int[Array, "R C"],
  filled_RW: Int[Array, "R W"],
) -> attention.Attend:
  """Attention of blocks to all before them, which also fills their pages.

  Args:
    start_R: position of each block's first token, a multiple of the tokens that
      fit into the pages that it fills; it may have fewer.
    page_table_RC: pages of each block's sequence in order of position; those
      before it are full, be it by another block of the same pass.
    filled_RW: where each page's worth of tokens goes. What lies past the end of
      the sequence is written too: nothing reads it before decoding does anew.

  Returns:
    The callback that the model's forward pass takes as `attend`.
  """

  def attend(query_RTKGH, key_RTKH, value_RTKH, pool, layer):
    num_tokens = filled_RW.shape[1] * xla_pages.page_size_of(pool)
    num_given = query_RTKGH.shape[1]
    query_RTKGH, key_RTKH, value_RTKH = (
      _fill_up(rows, num_tokens) for rows in (query_RTKGH, key_RTKH, value_RTKH)
    )
    shape = key_RTKH.shape
    flat = lambda rows_RTKH: rows_RTKH.reshape(-1, *shape[2:])
    pool = xla_pages.write_pages(
      pool, layer, filled_RW.reshape(-1), flat(key_RTKH), flat(value_RTKH)
    )
    block_R = start_R // num_tokens

    def attend_before(block, sums):
      page_ids_RW = _pages_of(page_table_RC, block, filled_RW.shape[1])
      rows = _read(pool, layer, page_ids_RW.reshape(-1))
      is_seen_R111 = (block < block_R).reshape(-1, 1, 1, 1)
      # A page that a block does not see may hold anything, NaN too, which a
      # weight of 0 would let through.
      key_RSKH, value_RSKH = (
        jnp.where(is_seen_R111, rows_SKH.reshape(shape), 0) for rows_SKH in rows
      )
      return _attend_block(
        query_RTKGH, key_RSKH, value_RSKH, is_seen_R111[..., 0], sums
      )

    causal_1TS = jnp.tril(jnp.ones((1, num_tokens, num_tokens), bool))
    # Each token sees itself, so that all maxima are finite from here on.
    sums = _attend_block(
      query_RTKGH, key_RTKH, value_RTKH, causal_1TS, _no_sums(query_RTKGH)
    )
    _, total_RKGT1, out_RKGTH = jax.lax.fori_loop(
      0, block_R.max(), attend_before, sums
    )
    out_RTKGH = jnp.moveaxis(out_RKGTH / total_RKGT1, 3, 1)
    return out_RTKGH[:, :num_given].astype(query_RTKGH.dtype), pool

  return attend


def _fill_up(
  rows: Float[Array, "R T *rest"], num_tokens: int
) -> Float[Array, "R S *rest"]:
  """Makes blocks of one length, so that short ones come out alike."""
  fill = [(0, 0)] * rows.ndim
  fill[1] = (0, num_tokens - rows.shape[1])
  return jnp.pad(rows, fill)


def _read(
  pool: kv_pool.KvPool, layer: Int[Array, ""], page_ids_C: Int[Array, "C"]
) -> tuple[Float[Array, "S K H"], Float[Array, "S K H"]]:
  """One layer's keys and values of all tokens of some pages, in order."""
  key_CKHO, value_CKOH = xla_pages.read_pages(pool, layer, page_ids_C)
  key_COKH = key_CKHO.transpose(0, 3, 1, 2)
  value_COKH = value_CKOH.transpose(0, 2, 1, 3)
  heads = key_COKH.shape[2:]
  return key_COKH.reshape(-1, *heads), value_COKH.reshape(-1, *heads)


def _pages_of(
  page_table_RC: Int[Array, "R C"], block: Int[Array, ""], num_pages: int
) -> Int[Array, "R W"]:
  """The pages of the block with this number, in each sequence."""
  return jax.lax.dynamic_slice_in_dim(
    page_table_RC, block * num_pages, num_pages, axis=1
  )


# Running maximum of the scores, sum of the weights, weighted sum of the values.
_Sums = tuple[
  Float[Array, "R K G T 1"],
  Float[Array, "R K G T 1"],
  Float[Array, "R K G T H"],
]


def _no_sums(query_RTKGH: Float[Array, "R T K G H"]) -> _Sums:
  out_RKGTH = jnp.zeros_like(jnp.moveaxis(query_RTKGH, 1, 3), jnp.float32)
  blank_RKGT1 = out_RKGTH[..., :1]
  return blank_RKGT1 - jnp.inf, blank_RKGT1, out_RKGTH


def _attend_block(
  query_RTKGH: Float[Array, "R T K G H"],
  key_RSKH: Float[Array, "R S K H"],
  value_RSKH: Float[Array, "R S K H"],
  is_seen_RTS: Bool[Array, "#R #T #S"],
  sums: _Sums,
) -> _Sums:
  """Adds a block of keys to the sums of a softmax, in fp32.

  A block with maximum m' scales the sums so far by exp(m - max(m, m')); one
  that is not seen changes them by not a bit.
  Source: Milakov and Gimelshein (https://arxiv.org/abs/1805.02867).
  """
  max_RKGT1, total_RKGT1, out_RKGTH = sums
  scores_RKGTS = jnp.einsum(
    "RTKGH,RSKH->RKGTS",
    query_RTKGH,
    key_RSKH,
    preferred_element_type=jnp.float32,
  )
  scores_RKGTS = jnp.where(
    is_seen_RTS[:, None, None],
    scores_RKGTS * query_RTKGH.shape[-1] ** -0.5,
    -jnp.inf,
  )
  new_max_RKGT1 = jnp.maximum(
    max_RKGT1, scores_RKGTS.max(axis=-1, keepdims=True)
  )
  scale_RKGT1 = jnp.exp(max_RKGT1 - new_max_RKGT1)
  weights_RKGTS = jnp.exp(scores_RKGTS - new_max_RKGT1)
  add_RKGTH = jnp.einsum(
    "RKGTS,RSKH->RKGTH",
    weights_RKGTS.astype(value_RSKH.dtype),
    value_RSKH,
    preferred_element_type=jnp.float32,
  )
  total_RKGT1 = total_RKGT1 * scale_RKGT1 + weights_RKGTS.sum(-1, keepdims=True)
  return new_max_RKGT1, total_RKGT1, out_RKGTH * scale_RKGT1 + add_RKGTH
