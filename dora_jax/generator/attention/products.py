"""Products within kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def dot(left: Array, right: Array, *, contracting: int) -> Array:
  """Product over left's last axis, in fp32; that of fp32 in full precision.

  Args:
    left: a matrix.
    right: another of its dtype.
    contracting: the axis of it that the product sums over.
  """
  is_full = left.dtype == jnp.float32
  return jax.lax.dot_general(
    left,
    right,
    (((1,), (contracting,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if is_full else None,
    preferred_element_type=jnp.float32,
  )
