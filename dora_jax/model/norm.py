"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from jaxtyping import Float


def rms_norm(
  values: Float[jax.Array, "*rows D"],
  scale_D: Float[jax.Array, "D"],
  eps: float,
) -> Float[jax.Array, "*rows D"]:
  """Divides by the root mean square and scales, in fp32.

  x / sqrt(mean(x²) + eps) * scale

  Source: Zhang and Sennrich (https://arxiv.org/abs/1910.07467).
  """
  wide = values.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  scale = scale_D.astype(jnp.float32).reshape((1,) * (wide.ndim - 1) + (-1,))
  return (wide * jax.lax.rsqrt(mean_square + eps) * scale).astype(values.dtype)
