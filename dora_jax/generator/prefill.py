"""Prefill: computes the KV of prompts, block by block, into pages of the pool.

A block is so many tokens of one sequence, from a multiple of that number on; a
pass computes a few blocks at once, a call as many passes as it needs. Blocks,
passes and calls have one shape each, or two. So the KV of a token depends, bit
by bit, on the tokens up to it and the params, and on nothing else: not on what
follows it or shares a call with it, nor on when it is computed and how much of
the prompt others had prefilled before. Moves, replay and the prefix cache rely
on this. Where a pass has several blocks it takes, as decoding does of its
slots, that a row of a product comes out the same wherever it stands; and where
short prompts are computed apart, that it does so in as many rows of shorter
blocks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from dora_jax import interfaces
from dora_jax.generator import kv_pool, pages
from dora_jax.generator.attention import base
from dora_jax.model import transformer

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
    shortens: whether prompts of up to half a block are computed apart, in
      blocks of half the tokens, twice as many a pass.
  """

  block_pages: int
  pass_blocks: int
  call_passes: int
  table_width: int
  shortens: bool

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
    shortens=platform == "cpu",
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
  """Some tokens of one sequence, and where their KV and that before them is.

  Attributes:
    tokens: of the block; fewer than it has room for where the sequence ends.
    start: position of the first.
    page_ids: pages of the sequence up to the block's end, in order of position.
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


def gather(
  blocks: Sequence[Block], *, sizes: Sizes, page_size: int
) -> list[Call]:
  """Lays blocks out for calls; those of one sequence must be in order.

  Returns:
    Calls in order, for at most sizes.call_blocks blocks one or two: the first
    has those that are computed apart, as they read no others.
  """
  block_tokens = sizes.block_pages * page_size
  fits = lambda block: block.start == 0 and len(block.tokens) <= half_tokens
  half_tokens = block_tokens // 2 if sizes.shortens else 0
  short = [block for block in blocks if fits(block)]
  others = [block for block in blocks if not fits(block)]
  calls = []
  if short:
    calls.append(
      _lay_out(
        short,
        shape=(-(-sizes.call_blocks // 2), 2 * sizes.pass_blocks, half_tokens),
        sizes=sizes,
      )
    )
  if others:
    calls.append(
      _lay_out(
        others,
        shape=(sizes.call_passes, sizes.pass_blocks, block_tokens),
        sizes=sizes,
      )
    )
  return calls


def _lay_out(
  blocks: Sequence[Block],
  *,
  shape: tuple[int, int, int],
  sizes: Sizes,
) -> Call:
  """A call of this shape, [U, R, T]."""
  num_passes, pass_blocks, num_tokens = shape
  num_rows = num_passes * pass_blocks
  tokens_BT = np.zeros((num_rows, num_tokens), np.int32)
  start_B = np.zeros(num_rows, np.int32)
  page_table_BC = np.zeros((num_rows, sizes.table_width), np.int32)
  filled_BW = np.full((num_rows, sizes.block_pages), pages.TRASH_PAGE, np.int32)
  for row, block in enumerate(blocks):
    tokens_BT[row, : len(block.tokens)] = block.tokens
    start_B[row] = block.start
    page_table_BC[row, : len(block.page_ids)] = block.page_ids
    filled_BW[row, : len(block.filled)] = block.filled
  by_pass = lambda rows: rows.reshape(num_passes, pass_blocks, *rows.shape[1:])
  return Call(
    tokens_URT=by_pass(tokens_BT),
    start_UR=by_pass(start_B),
    page_table_URC=by_pass(page_table_BC),
    filled_URW=by_pass(filled_BW),
    num_passes=np.int32(pages.num_pages_for(len(blocks), pass_blocks)),
  )


def prefill(
  params: interfaces.Params,
  pool: kv_pool.KvPool,
  call: Call,
  *,
  config: transformer.ModelConfig,
  paged: base.PagedAttention,
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
      attend=paged.prefill(
        start_R, call.page_table_URC[index], call.filled_URW[index]
      ),
      kv=pool,
    )
    return pool

  return jax.lax.fori_loop(0, call.num_passes, prefill_pass, pool)
