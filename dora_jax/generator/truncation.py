"""Which tokens top-k, top-p and min-p keep, as a threshold for each row.

Each rule keeps the likeliest tokens, so what all of them keep are the tokens
whose gap to the likeliest is at most some widest one. Bisection over the floats
finds it by 31 masked sums, where sorting would move the vocabulary: on 2 CPU
cores, 32 rows of 32,000 took 14 ms by bisection and 292 ms to sort.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Of float32. Floats from 0 to infinity are ordered as their bits are.
_INFINITY_BITS = 0x7F800000
_NUM_HALVINGS = 31


def widest_gap(
  gap_BV: Float[Array, "B V"],
  *,
  top_k_B: Int[Array, "B"],
  top_p_B: Float[Array, "B"],
  min_p_B: Float[Array, "B"],
  is_cut_B: Bool[Array, "B"],
) -> Float[Array, "B"]:
  """The widest gap of a token that all rules of its row keep.

  What it is for a row depends on that row alone, by not a bit on the others.

  Args:
    gap_BV: tempered logits below the row's largest; weights are exp(-gap).
    top_k_B: keeps the tokens with no wider gap than the k-th; 0 keeps all.
    top_p_B: keeps the narrowest gaps that hold at least this share of what
      top-k has left; 1 keeps all.
    min_p_B: keeps the tokens with at least this share of the largest weight.
    is_cut_B: rows that have any rule; of others nothing is found out.

  Returns:
    Gaps; infinity where all are kept.
  """
  num_rows, num_tokens = gap_BV.shape
  weight_BV = jnp.exp(-gap_BV)
  keep_all = lambda: jnp.full_like(min_p_B, jnp.inf)
  within = lambda gap_B: gap_BV <= gap_B[:, None]
  mass = lambda gap_B: jnp.where(within(gap_B), weight_BV, 0.0).sum(axis=-1)

  def find_top_k():
    count_B = jnp.minimum(top_k_B, num_tokens)
    return _least_gap(
      num_rows, lambda gap_B: within(gap_B).sum(axis=-1) >= count_B
    )

  has_top_k_B = is_cut_B & (top_k_B > 0)
  top_k_gap_B = jax.lax.cond(has_top_k_B.any(), find_top_k, keep_all)
  top_k_gap_B = jnp.where(has_top_k_B, top_k_gap_B, jnp.inf)

  def find_top_p():
    least_B = top_p_B * mass(top_k_gap_B)
    return _least_gap(num_rows, lambda gap_B: mass(gap_B) >= least_B)

  has_top_p_B = is_cut_B & (top_p_B < 1)
  top_p_gap_B = jax.lax.cond(has_top_p_B.any(), find_top_p, keep_all)
  top_p_gap_B = jnp.where(has_top_p_B, top_p_gap_B, jnp.inf)
  widest_B = jnp.minimum(top_k_gap_B, top_p_gap_B)
  return jnp.minimum(widest_B, -jnp.log(min_p_B))


def _least_gap(
  num_rows: int, is_enough: Callable[[Float[Array, "B"]], Bool[Array, "B"]]
) -> Float[Array, "B"]:
  """The least gap of each row that is enough, where any wider one is too."""

  def halve(_, bounds):
    low_B, high_B = bounds
    middle_B = low_B + (high_B - low_B) // 2
    is_enough_B = is_enough(jax.lax.bitcast_convert_type(middle_B, jnp.float32))
    low_B = jnp.where(is_enough_B, low_B, middle_B + 1)
    return low_B, jnp.where(is_enough_B, middle_B, high_B)

  bounds = (
    jnp.zeros(num_rows, jnp.int32),
    jnp.full(num_rows, _INFINITY_BITS, jnp.int32),
  )
  _, bits_B = jax.lax.fori_loop(0, _NUM_HALVINGS, halve, bounds)
  return jax.lax.bitcast_convert_type(bits_B, jnp.float32)
