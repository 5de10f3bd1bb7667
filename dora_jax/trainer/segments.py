"""Sums over the sequences of packed rows.

Every token gets the result of its own sequence. Where a sum is to leave out
tokens that the policy did not sample, their values must be 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int


def sums(
  values_BT: Float[jax.Array, "B T"], segment_ids_BT: Int[jax.Array, "B T"]
) -> Float[jax.Array, "B T"]:
  """The sum over the token's segment; over the padding for padding.

  In the order of the tokens on a CPU; a GPU may add in another one each time.
  """
  num_segments = values_BT.shape[1] + 1
  sums_BS = jax.vmap(
    lambda values_T, ids_T: jax.ops.segment_sum(
      values_T, ids_T, num_segments=num_segments
    )
  )(values_BT, segment_ids_BT)
  return jnp.take_along_axis(sums_BS, segment_ids_BT, axis=1)


def means(
  values_BT: Float[jax.Array, "B T"],
  loss_mask_BT: Float[jax.Array, "B T"],
  segment_ids_BT: Int[jax.Array, "B T"],
) -> Float[jax.Array, "B T"]:
  """The sum over the segment, divided by the segment's sampled tokens.

  A segment without sampled tokens is divided by 1.
  """
  counts_BT = sums(loss_mask_BT, segment_ids_BT)
  return sums(values_BT, segment_ids_BT) / jnp.maximum(counts_BT, 1.0)


def later_sums(
  values_BT: Float[jax.Array, "B T"], segment_ids_BT: Int[jax.Array, "B T"]
) -> Float[jax.Array, "B T"]:
  """The sum over the tokens of the segment that come after this one."""

  def step(carry, column):
    sum_B, carried_ids_B = carry
    values_B, ids_B = column
    later_B = jnp.where(ids_B == carried_ids_B, sum_B, 0.0)
    return (later_B + values_B, ids_B), later_B

  start = (jnp.zeros_like(values_BT[:, 0]), segment_ids_BT[:, -1])
  columns = (values_BT.T, segment_ids_BT.T)
  _, later_TB = jax.lax.scan(step, start, columns, reverse=True)
  return later_TB.T
