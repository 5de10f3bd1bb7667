"""Prefill: computes the KV of prompts, block by block, into pages of the pool.

A block is so many tokens of one sequence, from a multiple of that number on; a
pass computes a few blocks at once, a call as many passes as it needs. Blocks,
passes and calls have one shape each. So the KV of a token depends, bit by bit,
on the tokens up to it and the params, and on nothing else: not on what follows
it or shares a call with it, nor on when it is computed and how much of the
prompt others had prefilled before. Moves, replay and the prefix cache rely on
this. Where a pass has several blocks it takes, as decoding does of its slots,
that a row of a product comes out the same wherever it stands.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dora_jax import interfaces
from dora_jax.generator import kv_pool, pages
from dora_jax.model import attention, transformer

# Tokens of a block, but for whole pages: a common prefix is reused by whole
# blocks, so fewer find more; more make larger products.
_BLOCK_TOKENS = 64
# Tokens of a pass where the weights, which each pass reads anew, are what it
# costs. A CPU is at its arithmetic's limit with one block.
_PASS_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """How prefill is cut up.

  Attributes:
    block_pages: pages that a block fills.
    pass_blocks: blocks that are computed at once, R.
    call_passes: passes of a call at most.
    table_width: pages of a sequence of the greatest length, up to whole blocks.
  """

  block_pages: int
  pass_blocks: int
  call_passes: int
  table_width: int

  @property
  def call_blocks(self) -> int:
    """Blocks of a call at most."""
    return self.call_passes * self.pass_blocks


def choose_sizes(
  *, page_size: int, prefill_chunk: int, max_length: int, platform: str
) -> Sizes:
  """Cuts a chunk of prefill, all that a call computes, into passes and blocks.

  Args:
    page_size: token positions of a page.
    prefill_chunk: most tokens of a call; at least a page.
    max_length: most tokens of a sequence.
    platform: of the mesh's devices, such as "cpu".
  """
  chunk_pages = prefill_chunk // page_size
  block_pages = min(max(_BLOCK_TOKENS // page_size, 1), chunk_pages)
  call_blocks = chunk_pages // block_pages
  pass_blocks = 1
  if platform != "cpu":
    most = max(_PASS_TOKENS // (block_pages * page_size), 1)
    pass_blocks = min(most, call_blocks)
  num_blocks = pages.num_pages_for(max_length, block_pages * page_size)
  return Sizes(
    block_pages=block_pages,
    pass_blocks=pass_blocks,
    call_passes=call_blocks // pass_blocks,
    table_width=num_blocks * block_pages,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
  """Some tokens of one sequence, and where their KV and that before them is.

  Attributes:
    tokens: of the block; fewer than it has room for where the sequence ends.
    start: position of the first.
    page_ids: pages of the sequence up to the block, in order of position.
    filled: pages that the block fills; the trash page for those that have its
      KV already, which others may share.
  """

  tokens: Int[np.ndarray, "_"]
  start: int
  page_ids: Sequence[int]
  filled: Sequence[int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """The blocks of one call: U passes of R blocks of T tokens.

  Attributes:
    tokens_URT: token ids; 0 past the end of a sequence.
    start_UR: position of each block's first token.
    page_table_URC: pages of the block's sequence; what is not before the block
      is not read.
    filled_URW: pages that the block fills.
    num_passes: how many count.
  """

  tokens_URT: Any
  start_UR: Any
  page_table_URC: Any
  filled_URW: Any
  num_passes: Any


def gather(blocks: Sequence[Block], *, sizes: Sizes, page_size: int) -> Call:
  """Lays blocks out for a call; those of one sequence must be in order."""
  num_blocks = sizes.call_blocks
  tokens_BT = np.zeros((num_blocks, sizes.block_pages * page_size), np.int32)
  start_B = np.zeros(num_blocks, np.int32)
  page_table_BC = np.zeros((num_blocks, sizes.table_width), np.int32)
  filled_BW = np.full(
    (num_blocks, sizes.block_pages), pages.TRASH_PAGE, np.int32
  )
  for row, block in enumerate(blocks):
    tokens_BT[row, : len(block.tokens)] = block.tokens
    start_B[row] = block.start
    page_table_BC[row, : len(block.page_ids)] = block.page_ids
    filled_BW[row, : len(block.filled)] = block.filled
  by_pass = lambda rows: rows.reshape(
    sizes.call_passes, sizes.pass_blocks, *rows.shape[1:]
  )
  return Call(
    tokens_URT=by_pass(tokens_BT),
    start_UR=by_pass(start_B),
    page_table_URC=by_pass(page_table_BC),
    filled_URW=by_pass(filled_BW),
    num_passes=np.int32(pages.num_pages_for(len(blocks), sizes.pass_blocks)),
  )


def prefill(
  params: interfaces.Params,
  pool: kv_pool.KvPool,
  call: Call,
  *,
  config: transformer.ModelConfig,
) -> kv_pool.KvPool:
  """Writes the KV of a call's blocks into their pages, pass after pass."""
  offset_T = jnp.arange(call.tokens_URT.shape[2], dtype=jnp.int32)

  def prefill_pass(index, pool):
    start_R = call.start_UR[index]
    _, pool = transformer.forward(
      params,
      config,
      call.tokens_URT[index],
      start_R[:, None] + offset_T[None],
      attend=block_attention(
        start_R, call.page_table_URC[index], call.filled_URW[index]
      ),
      kv=pool,
    )
    return pool

  return jax.lax.fori_loop(0, call.num_passes, prefill_pass, pool)


def block_attention(
  start_R: Int[Array, "R"],
  page_table_RC: Int[Array, "R C"],
  filled_RW: Int[Array, "R W"],
) -> attention.Attend:
  """Attention of blocks to all before them, which also fills their pages.

  Args:
    start_R: position of each block's first token, a multiple of its tokens.
    page_table_RC: pages of each block's sequence in order of position; those
      before it are full, be it by another block of the same pass.
    filled_RW: where each page's worth of tokens goes. What lies past the end of
      the sequence is written too: nothing reads it before decoding does anew.

  Returns:
    The callback that the model's forward pass takes as `attend`.
  """

  def attend(query_RTKGH, key_RTKH, value_RTKH, pool, layer):
    shape = key_RTKH.shape
    flat = lambda rows_RTKH: rows_RTKH.reshape(-1, *shape[2:])
    pool = kv_pool.write_layer(
      pool, layer, filled_RW.reshape(-1), flat(key_RTKH), flat(value_RTKH)
    )
    block_R = start_R // shape[1]

    def attend_before(block, sums):
      page_ids_RW = _pages_of(page_table_RC, block, filled_RW.shape[1])
      rows = kv_pool.read_layer(pool, layer, page_ids_RW.reshape(-1))
      is_seen_R111 = (block < block_R).reshape(-1, 1, 1, 1)
      # A page that a block does not see may hold anything, NaN too, which a
      # weight of 0 would let through.
      key_RSKH, value_RSKH = (
        jnp.where(is_seen_R111, rows_SKH.reshape(shape), 0) for rows_SKH in rows
      )
      return _attend_block(
        query_RTKGH, key_RSKH, value_RSKH, is_seen_R111[..., 0], sums
      )

    causal_1TS = jnp.tril(jnp.ones((1, shape[1], shape[1]), bool))
    # Each token sees itself, so that all maxima are finite from here on.
    sums = _attend_block(
      query_RTKGH, key_RTKH, value_RTKH, causal_1TS, _no_sums(query_RTKGH)
    )
    _, total_RKGT1, out_RKGTH = jax.lax.fori_loop(
      0, block_R.max(), attend_before, sums
    )
    out_RTKGH = jnp.moveaxis(out_RKGTH / total_RKGT1, 3, 1)
    return out_RTKGH.astype(query_RTKGH.dtype), pool

  return attend


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
