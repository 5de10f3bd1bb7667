"""Estimates of KL(pi || ref) at sampled tokens, to be added to a loss.

Each takes k1 = log pi - log ref, clamped to +-20, and the importance weight
w = pi / behav, a constant that is 1 on policy; off policy nothing is right
without it. What is said of means holds for tokens drawn from behav, a step of
gradient descent included:

                          value            gradient of the mean
  k1                      w k1             that of KL(pi || ref)
  k2                      w k1^2 / 2       that of KL(pi || ref)
  k3                      w (e^-k1-1+k1)   that of KL(ref || pi)
  k3_straight_through     as k3            that of KL(pi || ref)

The mean of k1 and k3 is KL(pi || ref), that of k2 is not. A k1 that is simply
differentiated would have a gradient of mean 0; here its gradient is k1's value
times that of log pi, as it is where k1 is subtracted from the reward.
Sources: http://joschu.net/blog/kl-approx.html; for gradients Tang and Munos
(https://arxiv.org/abs/2506.09477).
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Float

Estimate = Callable[
  [Float[jax.Array, "B T"], Float[jax.Array, "B T"]], Float[jax.Array, "B T"]
]


def k1(
  log_ratios_BT: Float[jax.Array, "B T"], weights_BT: Float[jax.Array, "B T"]
) -> Float[jax.Array, "B T"]:
  """w k1, of low bias and high variance; it may be negative."""
  values_BT = weights_BT * log_ratios_BT
  return _with_gradient_of(values_BT, k2(log_ratios_BT, weights_BT))


def k2(
  log_ratios_BT: Float[jax.Array, "B T"], weights_BT: Float[jax.Array, "B T"]
) -> Float[jax.Array, "B T"]:
  """w k1^2 / 2."""
  return 0.5 * weights_BT * jnp.square(log_ratios_BT)


def k3(
  log_ratios_BT: Float[jax.Array, "B T"], weights_BT: Float[jax.Array, "B T"]
) -> Float[jax.Array, "B T"]:
  """w (exp(-k1) - 1 + k1), never negative."""
  return weights_BT * (jnp.exp(-log_ratios_BT) - 1.0 + log_ratios_BT)


def k3_straight_through(
  log_ratios_BT: Float[jax.Array, "B T"], weights_BT: Float[jax.Array, "B T"]
) -> Float[jax.Array, "B T"]:
  """The value of k3 with the gradient of k2."""
  return _with_gradient_of(
    k3(log_ratios_BT, weights_BT), k2(log_ratios_BT, weights_BT)
  )


ESTIMATES: Mapping[str, Estimate] = {
  "k1": k1,
  "k2": k2,
  "k3": k3,
  "k3_straight_through": k3_straight_through,
}


def _with_gradient_of(
  values_BT: Float[jax.Array, "B T"], other_BT: Float[jax.Array, "B T"]
) -> Float[jax.Array, "B T"]:
  return other_BT + jax.lax.stop_gradient(values_BT - other_BT)
