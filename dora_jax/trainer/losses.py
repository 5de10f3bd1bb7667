"""Losses of single tokens: pure functions of log-probabilities."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

# exp(20) is 5e8: far beyond any clip, far below what overflows float32.
MAX_LOG_RATIO = 20.0


class ClipStats(NamedTuple):
  """What the clipped loss saw of each token; carries no gradient.

  Attributes:
    log_ratios_BT: log of pi / pi_behavior, within +-MAX_LOG_RATIO, in nats.
    is_clipped_low_BT: advantage < 0 and the loss's r < 1 - clip_low: no
      gradient.
    is_clipped_high_BT: advantage > 0 and the loss's r > 1 + clip_high: no
      gradient.
    is_capped_BT: the token's weight is cut to weight_cap; False in ppo_clip,
      which has no weights.
  """

  log_ratios_BT: Float[jax.Array, "B T"]
  is_clipped_low_BT: Bool[jax.Array, "B T"]
  is_clipped_high_BT: Bool[jax.Array, "B T"]
  is_capped_BT: Bool[jax.Array, "B T"]


def ppo_clip(
  logprobs_BT: Float[jax.Array, "B T"],
  behavior_logprobs_BT: Float[jax.Array, "B T"],
  advantages_BT: Float[jax.Array, "B T"],
  *,
  clip_low: float,
  clip_high: float,
) -> tuple[Float[jax.Array, "B T"], ClipStats]:
  """Clips the policy's gain on each token; the loss is the negative gain.

  r = exp(clamp(logprob - behavior_logprob, -20, 20))
  loss = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

  The old policy of the ratio is the behavior policy, whatever the lag: its
  log-probabilities are those recorded at sampling time, never recomputed. No
  gradient flows where the clamp binds.
  Source: PPO, equation 7 (https://arxiv.org/abs/1707.06347); two bounds after
  DAPO, section 3.1 (https://arxiv.org/abs/2503.14476).

  Args:
    logprobs_BT: under the params being trained, in nats.
    behavior_logprobs_BT: as recorded at sampling time, in nats; a constant.
    advantages_BT: without unit; a constant.
    clip_low: how far below 1 the ratio still earns anything.
    clip_high: how far above 1 the ratio still earns anything.
  """
  behavior_logprobs_BT = jax.lax.stop_gradient(behavior_logprobs_BT)
  advantages_BT = jax.lax.stop_gradient(advantages_BT)
  log_ratios_BT = _log_ratios(logprobs_BT, behavior_logprobs_BT)
  ratios_BT = jnp.exp(log_ratios_BT)
  clipped_BT = jnp.clip(ratios_BT, 1.0 - clip_low, 1.0 + clip_high)
  loss_BT = -jnp.minimum(ratios_BT * advantages_BT, clipped_BT * advantages_BT)
  stats = ClipStats(
    log_ratios_BT=jax.lax.stop_gradient(log_ratios_BT),
    is_clipped_low_BT=(advantages_BT < 0.0) & (ratios_BT < 1.0 - clip_low),
    is_clipped_high_BT=(advantages_BT > 0.0) & (ratios_BT > 1.0 + clip_high),
    is_capped_BT=jnp.zeros(ratios_BT.shape, bool),
  )
  return loss_BT, stats


def decoupled_ppo(
  logprobs_BT: Float[jax.Array, "B T"],
  proximal_logprobs_BT: Float[jax.Array, "B T"],
  behavior_logprobs_BT: Float[jax.Array, "B T"],
  advantages_BT: Float[jax.Array, "B T"],
  *,
  clip_low: float,
  clip_high: float,
  weight_cap: float,
) -> tuple[Float[jax.Array, "B T"], ClipStats]:
  """Clips around a proximal policy; weights by who sampled the token.

  w = min(exp(clamp(proximal - behavior, -20, 20)), weight_cap), a constant
  r = exp(clamp(logprob - proximal, -20, 20))
  loss = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

  What the update is held near to (the proximal policy) is no longer what the
  tokens were drawn from (the behavior policy), which may therefore differ from
  token to token, as it does in a trajectory of several versions.
  Source: Hilton et al., section 3 (https://arxiv.org/abs/2110.00641); AReaL,
  section 5.2 (https://arxiv.org/abs/2505.24298). The cap is not theirs: it
  bounds the variance of w, at the price of a bias, as in IMPALA, section 4.1
  (https://arxiv.org/abs/1802.01561).

  Args:
    logprobs_BT: under the params being trained, in nats.
    proximal_logprobs_BT: under the params from which the step starts, in nats;
      a constant.
    behavior_logprobs_BT: as recorded at sampling time, in nats; a constant.
    advantages_BT: without unit; a constant.
    clip_low: how far below 1 the ratio to the proximal policy earns anything.
    clip_high: how far above 1 the ratio to the proximal policy earns anything.
    weight_cap: the largest weight of a token.
  """
  proximal_logprobs_BT = jax.lax.stop_gradient(proximal_logprobs_BT)
  weights_BT = jnp.exp(
    jax.lax.stop_gradient(
      _log_ratios(proximal_logprobs_BT, behavior_logprobs_BT)
    )
  )
  loss_BT, clip = ppo_clip(
    logprobs_BT,
    proximal_logprobs_BT,
    advantages_BT,
    clip_low=clip_low,
    clip_high=clip_high,
  )
  stats = clip._replace(
    log_ratios_BT=jax.lax.stop_gradient(
      _log_ratios(logprobs_BT, behavior_logprobs_BT)
    ),
    is_capped_BT=weights_BT > weight_cap,
  )
  return jnp.minimum(weights_BT, weight_cap) * loss_BT, stats


def _log_ratios(
  logprobs_BT: Float[jax.Array, "B T"], old_logprobs_BT: Float[jax.Array, "B T"]
) -> Float[jax.Array, "B T"]:
  return jnp.clip(logprobs_BT - old_logprobs_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def supervised(
  logprobs_BT: Float[jax.Array, "B T"],
) -> Float[jax.Array, "B T"]:
  """Negates the log-likelihood of each token, in nats."""
  return -logprobs_BT


def sum_where(
  values_BT: Float[jax.Array, "B T"], loss_mask_BT: Float[jax.Array, "B T"]
) -> Float[jax.Array, ""]:
  """Sums the values where the mask is set; others may even be NaN."""
  return jnp.sum(jnp.where(loss_mask_BT > 0.0, values_BT, 0.0))
