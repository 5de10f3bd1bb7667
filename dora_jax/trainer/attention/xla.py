"""Attention within segments in plain XLA, by blocks: for any device.

A query block reads the key blocks from the oldest segment that reaches into it,
in any row, up to its own tokens. Scores exist for one pair of blocks at a time,
in the backward pass too, which keeps the output and one number a query.

Source: FlashAttention-2, sections 2.3 and 3.1
(https://arxiv.org/abs/2307.08691).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dora_jax.model import attention, linear, transformer
from dora_jax.trainer.attention import base

# Token positions of a block: scores of a few heads stay in a core's cache.
_BLOCK = 128
# Finite, so that no difference of two of them is NaN.
_MASKED = -1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class XlaAttention:
  """Attention by blocks; `attend` below.

  Attributes:
    mesh: of the trainer; each device attends on its rows and heads, of the
      queries on its tokens. None leaves it to XLA to share them out, which
      splits no row.
  """

  mesh: Mesh | None = None
  name: str = "xla"

  def find_obstacle(
    self, config: transformer.ModelConfig, *, row_length: int
  ) -> str | None:
    """There is none."""
    del config, row_length

  def attend(self, segment_ids_BT: Int[Array, "B T"]) -> attention.Attend:
    """The callback that the model's forward pass takes."""
    if self.mesh is None or self.mesh.size == 1:
      on_rows = functools.partial(attend, first=0)
    else:
      on_rows = base.on_each_device(attend, self.mesh)
    return base.as_callback(on_rows, segment_ids_BT)


def segment_starts(segment_ids_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """Index of the first token of each token's segment; of padding, its own.

  Token t attends to the tokens from there to t. The tokens of a segment must
  stand side by side.
  """
  index_BT = jnp.broadcast_to(
    jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)[None],
    segment_ids_BT.shape,
  )
  before_BT = jnp.roll(segment_ids_BT, 1, axis=1).at[:, 0].set(0)
  is_start_BT = (segment_ids_BT != before_BT) | (segment_ids_BT == 0)
  return jax.lax.cummax(jnp.where(is_start_BT, index_BT, 0), axis=1)


def attend(
  query_BTKGH: Float[Array, "B T K G H"],
  key_BSKH: Float[Array, "B S K H"],
  value_BSKH: Float[Array, "B S K H"],
  segment_ids_BS: Int[Array, "B S"],
  first: jax.typing.ArrayLike,
) -> Float[Array, "B T K G H"]:
  """What model.attention.segment_attention gives, zeros for padding included.

  Sums are in float32, as is the softmax.

  Args:
    query_BTKGH: of T of a row's S tokens.
    key_BSKH: of the whole row.
    value_BSKH: of the whole row.
    segment_ids_BS: of the whole row.
    first: index in the row of the first query's token.
  """
  num_tokens = query_BTKGH.shape[1]
  num_blocks = -(-num_tokens // _BLOCK)
  block = -(-num_tokens // num_blocks)
  own = lambda x: jax.lax.dynamic_slice_in_dim(x, first, num_tokens, axis=1)
  scale = query_BTKGH.shape[-1] ** -0.5
  # Heads before tokens, once: products within a head then need no transpose.
  query_BKGTH = jnp.moveaxis(_fill(query_BTKGH * scale, block), 1, 3)
  out_BKGTH = _attend(
    block,
    query_BKGTH,
    jnp.moveaxis(_fill(key_BSKH, block), 1, 2),
    jnp.moveaxis(_fill(value_BSKH, block), 1, 2),
    _fill(own(segment_starts(segment_ids_BS)), block, segment_ids_BS.shape[1]),
    jnp.asarray(first, jnp.int32),
  )
  out_BTKGH = jnp.moveaxis(out_BKGTH, 3, 1)[:, :num_tokens]
  is_real_BT = (own(segment_ids_BS) != 0)[:, :, None, None, None]
  return jnp.where(is_real_BT, out_BTKGH, 0.0)


def _fill(values, block, filling=0):
  """Fills the tokens, axis 1, up to whole blocks.

  Of queries that are none, the start is past the row's end: they read nothing,
  and nothing is read of what comes out.
  """
  widths = [(0, 0)] * values.ndim
  widths[1] = (0, -values.shape[1] % block)
  return jnp.pad(values, widths, constant_values=filling)


class _Kept(NamedTuple):
  """What the backward pass needs of a call."""

  query_BKGTH: Array
  key_BKSH: Array
  value_BKSH: Array
  start_BT: Array
  first: Array
  out_BKGTH: Array
  normalizer_BKGT: Array


def _only_attend(block, *arrays):
  """Attention of scaled queries, each from its start to itself."""
  return _forward(block, *arrays)[0]


def _forward(block, query_BKGTH, key_BKSH, value_BKSH, start_BT, first):
  """The output, and what `_backward` wants."""
  low_I, high_I = _find_bounds(key_BKSH, start_BT, first, block)

  def attend_block(_, i):
    query_BKGTH_i = _take(query_BKGTH, i, block, 3)
    shape = query_BKGTH_i.shape

    def add(j, carry):
      most_BKGT, total_BKGT, sum_BKGTH = carry
      scores_BKGTS = _scores(
        query_BKGTH_i, _take(key_BKSH, j, block, 2), start_BT, first, i, j
      )
      now_BKGT = jnp.maximum(most_BKGT, scores_BKGTS.max(axis=-1))
      weights_BKGTS = jnp.exp(scores_BKGTS - now_BKGT[..., None])
      kept_BKGT = jnp.exp(most_BKGT - now_BKGT)
      total_BKGT = total_BKGT * kept_BKGT + weights_BKGTS.sum(axis=-1)
      new_BKGTH = _per_head(
        "BKQS,BKSH->BKQH",
        weights_BKGTS.astype(value_BKSH.dtype),
        _take(value_BKSH, j, block, 2),
      )
      return now_BKGT, total_BKGT, sum_BKGTH * kept_BKGT[..., None] + new_BKGTH

    most_BKGT, total_BKGT, sum_BKGTH = jax.lax.fori_loop(
      low_I[i],
      high_I[i],
      add,
      (
        jnp.full(shape[:-1], _MASKED, jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32),
        jnp.zeros(shape, jnp.float32),
      ),
    )
    out_BKGTH = sum_BKGTH / total_BKGT[..., None]
    normalizer_BKGT = most_BKGT + jnp.log(total_BKGT)
    return None, (out_BKGTH.astype(query_BKGTH.dtype), normalizer_BKGT)

  _, parts = jax.lax.scan(attend_block, None, _indices(low_I))
  out_BKGTH, normalizer_BKGT = (
    ad_checkpoint.checkpoint_name(_join(part), base.KEPT) for part in parts
  )
  arrays = (query_BKGTH, key_BKSH, value_BKSH, start_BT, first)
  return out_BKGTH, _Kept(*arrays, out_BKGTH, normalizer_BKGT)


def _backward(block, kept, grad_BKGTH):
  """Gradients of queries, keys and values; the others have none."""
  low_I, high_I = _find_bounds(kept.key_BKSH, kept.start_BT, kept.first, block)
  wide = lambda x: x.astype(jnp.float32)
  mean_BKGT = jnp.sum(wide(grad_BKGTH) * wide(kept.out_BKGTH), axis=-1)
  dtype = kept.query_BKGTH.dtype

  def attend_block(sums, i):
    query_BKGTH_i, grad_BKGTH_i, normalizer_BKGT_i, mean_BKGT_i = (
      _take(x, i, block, 3)
      for x in (kept.query_BKGTH, grad_BKGTH, kept.normalizer_BKGT, mean_BKGT)
    )

    def add(j, carry):
      grad_query_BKGTH, grad_key_BKHS, grad_value_BKHS = carry
      key_BKSH_j = _take(kept.key_BKSH, j, block, 2)
      scores_BKGTS = _scores(
        query_BKGTH_i, key_BKSH_j, kept.start_BT, kept.first, i, j
      )
      weights_BKGTS = jnp.exp(scores_BKGTS - normalizer_BKGT_i[..., None])
      slopes_BKGTS = _per_head(
        "BKQH,BKSH->BKQS", grad_BKGTH_i, _take(kept.value_BKSH, j, block, 2)
      )
      slopes_BKGTS = (slopes_BKGTS - mean_BKGT_i[..., None]) * weights_BKGTS
      weights_BKGTS = weights_BKGTS.astype(dtype)
      slopes_BKGTS = slopes_BKGTS.astype(dtype)
      # The narrow array first: that is the one XLA turns around on CPU.
      value_part_BKHS = _summed("BKQH,BKQS->BKHS", grad_BKGTH_i, weights_BKGTS)
      key_part_BKHS = _summed("BKQH,BKQS->BKHS", query_BKGTH_i, slopes_BKGTS)
      return (
        grad_query_BKGTH
        + _per_head("BKQS,BKSH->BKQH", slopes_BKGTS, key_BKSH_j),
        _add_at(grad_key_BKHS, key_part_BKHS, j),
        _add_at(grad_value_BKHS, value_part_BKHS, j),
      )

    nothing_BKGTH = jnp.zeros(query_BKGTH_i.shape, jnp.float32)
    grad_query_BKGTH, *sums = jax.lax.fori_loop(
      low_I[i], high_I[i], add, (nothing_BKGTH, *sums)
    )
    return tuple(sums), grad_query_BKGTH.astype(dtype)

  none_BKHS = jnp.zeros_like(kept.key_BKSH.swapaxes(2, 3), jnp.float32)
  sums, grad_query_IBKGTH = jax.lax.scan(
    attend_block, (none_BKHS, none_BKHS), _indices(low_I)
  )
  grad_key_BKSH, grad_value_BKSH = (
    x.swapaxes(2, 3).astype(kept.key_BKSH.dtype) for x in sums
  )
  return _join(grad_query_IBKGTH), grad_key_BKSH, grad_value_BKSH, None, None


_attend: Any = jax.custom_vjp(_only_attend, nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward)


def _find_bounds(key_BKSH, start_BT, first, block):
  """The first key block that each query block reads, and the one past these."""
  num_rows, num_tokens = start_BT.shape
  start_BIT = start_BT.reshape(num_rows, num_tokens // block, block)
  low_I = start_BIT.min(axis=(0, 2)) // block
  last_I = first + (_indices(low_I) + 1) * block - 1
  num_blocks = key_BKSH.shape[2] // block
  return low_I, jnp.minimum(last_I // block + 1, num_blocks)


def _indices(values_I):
  """0, 1, ..."""
  return jnp.arange(len(values_I), dtype=jnp.int32)


def _take(values, i, block, axis):
  """Block i of an axis."""
  return jax.lax.dynamic_slice_in_dim(values, i * block, block, axis)


def _add_at(sum_BKHS, part_BKHS, j):
  """Adds to block j of the last axis."""
  block = part_BKHS.shape[3]
  new = _take(sum_BKHS, j, block, 3) + part_BKHS
  return jax.lax.dynamic_update_slice_in_dim(sum_BKHS, new, j * block, 3)


def _join(parts):
  """[I, B, K, G, T, ...] of blocks to [B, K, G, I * T, ...]."""
  parts = jnp.moveaxis(parts, 0, 3)
  shape = parts.shape
  return parts.reshape(*shape[:3], shape[3] * shape[4], *shape[5:])


def _flat(values):
  """[B, K, G, T, x] as [B, K, Q, x]: the queries of a key head, Q = G T."""
  shape = values.shape
  return values.reshape(*shape[:2], shape[2] * shape[3], shape[4])


def _per_head(spec, left_BKGTX, right_BKXY):
  """An einsum of what queries have with what keys have, summed in float32."""
  out_BKQY = linear.summed(spec, _flat(left_BKGTX), right_BKXY, jnp.float32)
  return out_BKQY.reshape(*left_BKGTX.shape[:-1], out_BKQY.shape[-1])


def _summed(spec, left_BKGTX, right_BKGTY):
  """An einsum of two things that queries have, summed over them."""
  return linear.summed(spec, _flat(left_BKGTX), _flat(right_BKGTY), jnp.float32)


def _scores(query_BKGTH_i, key_BKSH_j, start_BT, first, i, j):
  """Scores of two blocks, where a query may read a key."""
  scores_BKGTS = _per_head("BKQH,BKSH->BKQS", query_BKGTH_i, key_BKSH_j)
  block = key_BKSH_j.shape[2]
  offsets = jnp.arange(block, dtype=jnp.int32)
  key_11S = (j * block + offsets)[None, None, :]
  query_1T1 = (first + i * block + offsets)[None, :, None]
  start_BT1 = _take(start_BT, i, block, 1)[:, :, None]
  mask_BTS = (start_BT1 <= key_11S) & (key_11S <= query_1T1)
  return jnp.where(mask_BTS[:, None, None], scores_BKGTS, _MASKED)
