"""Attention of whole rows against themselves: training, and prefill's core."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

# (query_BTKGH, key_BTKH, value_BTKH, kv, layer) -> (out_BTKGH, kv). It scales
# the scores by H ** -0.5 itself; `layer` is an int32 scalar, `kv` any pytree.
Attend = Callable[
  [jax.Array, jax.Array, jax.Array, Any, jax.Array], tuple[jax.Array, Any]
]

# Finite, so that a row with nothing to attend to gives no NaN.
_MASKED = -1e30


def attend_where(
  mask_BTS: Bool[jax.Array, "#B T S"],
  query_BTKGH: Float[jax.Array, "B T K G H"],
  key_BSKH: Float[jax.Array, "B S K H"],
  value_BSKH: Float[jax.Array, "B S K H"],
) -> Float[jax.Array, "B T K G H"]:
  """Softmax attention over the keys that the mask admits, in fp32.

  out[t] = sum_s softmax_s(query[t] · key[s] / sqrt(H)) value[s]

  A query that no key is admitted for yields zeros.
  Source: Attention Is All You Need, section 3.2.1
  (https://arxiv.org/abs/1706.03762).
  """
  scores_BKGTS = jnp.einsum(
    "BTKGH,BSKH->BKGTS",
    query_BTKGH,
    key_BSKH,
    preferred_element_type=jnp.float32,
  )
  scores_BKGTS *= query_BTKGH.shape[-1] ** -0.5
  mask_BKGTS = mask_BTS[:, None, None]
  weights_BKGTS = jax.nn.softmax(
    jnp.where(mask_BKGTS, scores_BKGTS, _MASKED), axis=-1
  )
  weights_BKGTS = jnp.where(mask_BKGTS, weights_BKGTS, 0.0)
  return jnp.einsum(
    "BKGTS,BSKH->BTKGH", weights_BKGTS.astype(value_BSKH.dtype), value_BSKH
  )


def segment_attention(
  segment_ids_BT: Int[jax.Array, "B T"],
) -> Attend:
  """Causal attention within each segment of a packed row.

  Token t attends to the tokens at s <= t that share its nonzero segment id, so
  that a packed sequence sees exactly what it would see alone.
  """
  num_tokens = segment_ids_BT.shape[1]
  causal_TS = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
  same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
  real_BTS = segment_ids_BT[:, None, :] != 0
  mask_BTS = causal_TS[None] & same_BTS & real_BTS

  def attend(
    query_BTKGH: jax.Array,
    key_BTKH: jax.Array,
    value_BTKH: jax.Array,
    kv: Any,
    layer: jax.Array,
  ) -> tuple[jax.Array, Any]:
    del layer
    return attend_where(mask_BTS, query_BTKGH, key_BTKH, value_BTKH), kv

  return attend


def causal_attention() -> Attend:
  """Causal attention of rows that hold one sequence each, without padding."""

  def attend(
    query_BTKGH: jax.Array,
    key_BTKH: jax.Array,
    value_BTKH: jax.Array,
    kv: Any,
    layer: jax.Array,
  ) -> tuple[jax.Array, Any]:
    whole_BT = jnp.ones(query_BTKGH.shape[:2], jnp.int32)
    one_segment = segment_attention(whole_BT)
    return one_segment(query_BTKGH, key_BTKH, value_BTKH, kv, layer)

  return attend
