"""The TPU kernel: attention of a few tokens to the pages of their sequence.

A program takes one block of query tokens of one sequence. It copies the pages
up to them into fast memory, some at a time, while it attends to those copied
before: a copy is always under way, the next program's first one too.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from dora_jax.generator.attention import products

# Key positions that are copied at once. More hide more of the latency of a
# copy; two such copies, and the sums of all query rows, must fit fast memory.
_MOST_KEYS = 512
_MOST_COPY_BYTES = 2 * 2**20
_MOST_QUERY_ROWS = 2048
# Finite, so that no difference of two of them is NaN.
_MASKED = -1e30


def attend_pages(
  query_BTKGH: Float[Array, "B T K G H"],
  pool_LJWKERH: Float[Array, "L J W K 2 R H"],
  page_table_BC: Int[Array, "B C"],
  start_B: Int[Array, "B"],
  layer: Int[Array, ""],
  *,
  scale: float,
  interpret: bool,
) -> Float[Array, "B T K G H"]:
  """Softmax attention of tokens to their sequence up to themselves.

  Source: FlashAttention (https://arxiv.org/abs/2205.14135), over the pages of
  PagedAttention (https://arxiv.org/abs/2309.06180).

  Args:
    query_BTKGH: of T tokens in a row of each sequence.
    pool_LJWKERH: pages of W times R positions; along E, the keys of a head and
      then its values.
    page_table_BC: the pages of each sequence, in order of position.
    start_B: position of each sequence's first query token, whose KV, like that
      of all up to the last one, is in the pool.
    layer: which layer's pages to read.
    scale: of the scores.
    interpret: whether to simulate the kernel.
  """
  num_rows, num_tokens, num_heads, num_queries, width = query_BTKGH.shape
  block_tokens = _choose_block(num_tokens, num_heads * num_queries)
  block_rows = block_tokens * num_queries
  query_BKQH = jnp.moveaxis(query_BTKGH, 2, 1).reshape(
    num_rows, num_heads, num_tokens * num_queries, width
  )
  num_pages = _choose_copy(pool_LJWKERH, page_table_BC.shape[1])
  block = pl.BlockSpec(
    (None, num_heads, block_rows, width),
    lambda row, block, *_: (row, 0, block, 0),
  )
  sums = lambda size: pltpu.VMEM((num_heads, block_rows, size), jnp.float32)
  out_BKQH = pl.pallas_call(
    functools.partial(_attend_block, num_queries=num_queries, scale=scale),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(num_rows, num_tokens // block_tokens),
      in_specs=[block, pl.BlockSpec(memory_space=pl.ANY)],
      out_specs=block,
      scratch_shapes=[
        pltpu.VMEM((2, num_pages, *pool_LJWKERH.shape[2:]), pool_LJWKERH.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
        sums(1),
        sums(1),
        sums(width),
      ],
    ),
    out_shape=jax.ShapeDtypeStruct(query_BKQH.shape, query_BKQH.dtype),
    # In order: each program starts the next one's copy.
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("arbitrary", "arbitrary")
    ),
    interpret=pltpu.InterpretParams() if interpret else False,
    name="paged_attention",
  )(page_table_BC, start_B, layer[None], query_BKQH, pool_LJWKERH)
  out_BKTGH = out_BKQH.reshape(
    num_rows, num_heads, num_tokens, num_queries, width
  )
  return jnp.moveaxis(out_BKTGH, 1, 2)


def _page_size(paged) -> int:
  """Token positions of a page, [..., W, K, 2, R, H]."""
  return paged.shape[-5] * paged.shape[-2]


def _choose_block(num_tokens: int, rows_a_token: int) -> int:
  """Query tokens of a program: all, or a power of two that divides them."""
  block = num_tokens
  while block * rows_a_token > _MOST_QUERY_ROWS and block % 2 == 0:
    block //= 2
  return block


def _choose_copy(pool_LJWKERH: Array, table_width: int) -> int:
  """Pages that are copied at once."""
  page_size = _page_size(pool_LJWKERH)
  page_bytes = math.prod(pool_LJWKERH.shape[2:]) * pool_LJWKERH.dtype.itemsize
  most = min(_MOST_KEYS // page_size, _MOST_COPY_BYTES // page_bytes)
  return min(max(most, 1), table_width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reader:
  """Copies pages of the pool into one of two buffers.

  Attributes:
    table_ref: [B, C] pages, in scalar memory.
    start_ref: [B] position of each sequence's first query token.
    layer_ref: [1].
    pool_ref: [L, J, W, K, 2, R, H] in main memory.
    buffer_ref: [2, pages of a copy, W, K, 2, R, H].
    semaphore_ref: [2], one for the copies into each buffer.
    block_tokens: query tokens of a program.
  """

  table_ref: jax.Ref
  start_ref: jax.Ref
  layer_ref: jax.Ref
  pool_ref: jax.Ref
  buffer_ref: jax.Ref
  semaphore_ref: jax.Ref
  block_tokens: int

  @property
  def copy_keys(self) -> int:
    """Key positions of a copy."""
    return self.buffer_ref.shape[1] * _page_size(self.buffer_ref)

  def first_query(self, row, block):
    """Position of the first query token of a program."""
    return self.start_ref[row] + block * self.block_tokens

  def end(self, row, block):
    """Positions that a program attends to: all up to its last query token."""
    return self.first_query(row, block) + self.block_tokens

  def start_copy(self, row, block, step, buffer):
    """Starts to copy the pages of one step of a program."""
    for copy in self._copies(row, block, step, buffer):
      copy.start()

  def finish_copy(self, row, block, step, buffer):
    """Waits until they are there."""
    for copy in self._copies(row, block, step, buffer):
      copy.wait()

  def _copies(self, row, block, step, buffer):
    num_pages, page_size = self.buffer_ref.shape[1], _page_size(self.buffer_ref)
    # Beyond the last page, which may be nobody's, that one is copied again.
    last = pl.cdiv(self.end(row, block), page_size) - 1
    for index in range(num_pages):
      column = jnp.minimum(step * num_pages + index, last)
      page = self.table_ref[row, column]
      yield pltpu.make_async_copy(
        self.pool_ref.at[self.layer_ref[0], page],
        self.buffer_ref.at[buffer, index],
        self.semaphore_ref.at[buffer],
      )


def _attend_block(
  table_ref,  # [B, C]
  start_ref,  # [B]
  layer_ref,  # [1]
  query_ref,  # [K, Q, H], Q = query tokens of the program * G
  pool_ref,  # [L, J, W, K, 2, R, H]
  out_ref,  # [K, Q, H]
  buffer_ref,  # [2, pages of a copy, W, K, 2, R, H]
  semaphore_ref,  # [2]
  turn_ref,  # [1], the buffer that the next step reads
  max_ref,  # [K, Q, 1]
  total_ref,  # [K, Q, 1]
  sum_ref,  # [K, Q, H]
  *,
  num_queries: int,
  scale: float,
):
  """One program: copies pages and attends to them, step after step."""
  row, block = pl.program_id(0), pl.program_id(1)
  num_rows, num_blocks = pl.num_programs(0), pl.num_programs(1)
  reader = _Reader(
    table_ref=table_ref,
    start_ref=start_ref,
    layer_ref=layer_ref,
    pool_ref=pool_ref,
    buffer_ref=buffer_ref,
    semaphore_ref=semaphore_ref,
    block_tokens=query_ref.shape[1] // num_queries,
  )

  @pl.when(row + block == 0)
  def _():
    turn_ref[0] = 0
    reader.start_copy(row, block, 0, 0)

  max_ref[...] = jnp.full_like(max_ref, _MASKED)
  total_ref[...] = jnp.zeros_like(total_ref)
  sum_ref[...] = jnp.zeros_like(sum_ref)
  end = reader.end(row, block)
  num_steps = pl.cdiv(end, reader.copy_keys)
  is_last_block = block + 1 == num_blocks
  next_row = jnp.where(is_last_block, row + 1, row)
  next_block = jnp.where(is_last_block, 0, block + 1)

  def take_step(step, _):
    buffer = turn_ref[0]

    @pl.when(step + 1 < num_steps)
    def _():
      reader.start_copy(row, block, step + 1, 1 - buffer)

    @pl.when((step + 1 == num_steps) & (next_row < num_rows))
    def _():
      reader.start_copy(next_row, next_block, 0, 1 - buffer)

    reader.finish_copy(row, block, step, buffer)
    turn_ref[0] = 1 - buffer
    positions = _Positions(
      first_key=step * reader.copy_keys,
      first_query=reader.first_query(row, block),
      end=end,
      num_queries=num_queries,
    )
    for head in range(query_ref.shape[0]):
      _add_keys(
        query_ref[head],
        _read(buffer_ref, buffer, head, 0),
        _read(buffer_ref, buffer, head, 1),
        positions,
        max_ref.at[head],
        total_ref.at[head],
        sum_ref.at[head],
        scale=scale,
      )
    return _

  jax.lax.fori_loop(0, num_steps, take_step, None)
  out_ref[...] = (sum_ref[...] / total_ref[...]).astype(out_ref.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Positions:
  """Where the keys and queries of a step are.

  Attributes:
    first_key: position of the first key.
    first_query: position of the first query token.
    end: positions that have keys.
    num_queries: rows of queries of a token, G.
  """

  first_key: Array
  first_query: Array
  end: Array
  num_queries: int


def _read(buffer_ref, buffer, head: int, which: int) -> Array:
  """Keys (0) or values (1) of a head in all pages of a copy, in order."""
  rows_CWRH = buffer_ref[buffer, :, :, head, which]
  return rows_CWRH.reshape(-1, rows_CWRH.shape[-1])


def _add_keys(
  query_QH: Float[Array, "Q H"],
  key_SH: Float[Array, "S H"],
  value_SH: Float[Array, "S H"],
  positions: _Positions,
  max_ref,  # [Q, 1]
  total_ref,  # [Q, 1]
  sum_ref,  # [Q, H]
  *,
  scale: float,
):
  """Adds some keys to the sums of a softmax; all sums are fp32."""
  shape = query_QH.shape[0], key_SH.shape[0]
  token_QS = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  query_QS = positions.first_query + token_QS // positions.num_queries
  key_QS = positions.first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  scores_QS = products.dot(query_QH, key_SH, contracting=1)
  scores_QS = jnp.where(key_QS <= query_QS, scores_QS * scale, _MASKED)
  # What a former request left there may be NaN, which 0 * NaN would let pass.
  position_SH = positions.first_key + jax.lax.broadcasted_iota(
    jnp.int32, value_SH.shape, 0
  )
  value_SH = jnp.where(
    position_SH < positions.end, value_SH, jnp.zeros_like(value_SH)
  )
  max_Q1 = jnp.maximum(max_ref[...], scores_QS.max(axis=1, keepdims=True))
  scale_Q1 = jnp.exp(max_ref[...] - max_Q1)
  weights_QS = jnp.exp(scores_QS - max_Q1)
  add_QH = products.dot(
    weights_QS.astype(value_SH.dtype), value_SH, contracting=0
  )
  total_ref[...] = total_ref[...] * scale_Q1 + weights_QS.sum(
    axis=1, keepdims=True
  )
  sum_ref[...] = sum_ref[...] * scale_Q1 + add_QH
  max_ref[...] = max_Q1
