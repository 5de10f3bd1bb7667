"""Losses of single tokens: pure functions of log-probabilities.

Each takes `Tokens` and its own keyword arguments, which are fields of the
objective (objective.py) and hence of config.trainer. r is the ratio
pi / prox = exp(clamp(logprob - proximal_logprob, -20, 20)), A the advantage, sg
what carries no gradient. Which policy is proximal, and how a token is weighted
by who sampled it, is chosen apart (ratios.py): decoupled PPO is `ppo_clip`
around the current policy with truncated weights.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from dora_jax.trainer import ratios, segments


class Tokens(NamedTuple):
  """What a loss sees of each token of packed rows.

  Where the mask is 0, all values but the ids must be 0. All but `logprobs_BT`
  are constants.

  Attributes:
    logprobs_BT: under the params being trained, in nats.
    proximal_logprobs_BT: under the proximal policy, in nats.
    advantages_BT: without unit.
    loss_mask_BT: 1.0 where the policy sampled the token.
    segment_ids_BT: which sequence of its row it belongs to.
  """

  logprobs_BT: Float[jax.Array, "B T"]
  proximal_logprobs_BT: Float[jax.Array, "B T"]
  advantages_BT: Float[jax.Array, "B T"]
  loss_mask_BT: Float[jax.Array, "B T"]
  segment_ids_BT: Int[jax.Array, "B T"]


class Bounds(NamedTuple):
  """Where a loss holds the policy back; carries no gradient.

  Attributes:
    is_low_BT: the ratio is below the lower bound in the direction that the
      advantage pushes to.
    is_high_BT: above the upper bound, likewise.
  """

  is_low_BT: Bool[jax.Array, "B T"]
  is_high_BT: Bool[jax.Array, "B T"]


Loss = Callable[..., tuple[Float[jax.Array, "B T"], Bounds]]


def reinforce(tokens: Tokens) -> tuple[Float[jax.Array, "B T"], Bounds]:
  """loss = -A log pi: right for samples of the current policy only.

  Source: Williams, 1992 (https://doi.org/10.1007/BF00992696).
  """
  nowhere_BT = jnp.zeros(tokens.logprobs_BT.shape, bool)
  loss_BT = -tokens.advantages_BT * tokens.logprobs_BT
  return loss_BT, Bounds(is_low_BT=nowhere_BT, is_high_BT=nowhere_BT)


def ppo_clip(
  tokens: Tokens, *, clip_low: float, clip_high: float
) -> tuple[Float[jax.Array, "B T"], Bounds]:
  """loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

  Source: PPO, equation 7 (https://arxiv.org/abs/1707.06347); two bounds after
  DAPO, section 3.1 (https://arxiv.org/abs/2503.14476).
  """
  return _clipped(_ratios(tokens), tokens.advantages_BT, clip_low, clip_high)


def dual_clip(
  tokens: Tokens, *, clip_low: float, clip_high: float, clip_loss: float
) -> tuple[Float[jax.Array, "B T"], Bounds]:
  """`ppo_clip`, but never more than -clip_loss A where A < 0.

  Without it, a token that has become likely although A < 0 costs r |A| without
  bound. A ratio above clip_loss is counted as above the upper bound.

  With clip_low, clip_high, clip_loss as eps_neg_low, eps_pos_high,
  eps_neg_high this is the triplet clip of the LongCat report, whose truncated
  ratio of the engines is the correction "tis" around the recomputed policy.
  Sources: Ye et al., equation 5 (https://arxiv.org/abs/1912.09729);
  LongCat-Flash-Thinking (https://arxiv.org/abs/2509.18883).
  """
  ratios_BT, advantages_BT = _ratios(tokens), tokens.advantages_BT
  loss_BT, bounds = _clipped(ratios_BT, advantages_BT, clip_low, clip_high)
  is_beyond_BT = (advantages_BT < 0.0) & (ratios_BT > clip_loss)
  loss_BT = jnp.where(is_beyond_BT, -clip_loss * advantages_BT, loss_BT)
  return loss_BT, bounds._replace(is_high_BT=bounds.is_high_BT | is_beyond_BT)


def gspo(
  tokens: Tokens, *, clip_low: float, clip_high: float
) -> tuple[Float[jax.Array, "B T"], Bounds]:
  """`ppo_clip` of one ratio for the whole sequence.

  s = exp(mean_t log r), and each token's r is sg(s) pi / sg(pi): of value s,
  with the gradient of its own log-probability. Its bounds are far closer to 1
  than a token's (3e-4 and 4e-4 in the paper), and it is meant for the
  aggregation "sequence_mean".
  Source: GSPO-token, section 4.3 (https://arxiv.org/abs/2507.18071).
  """
  logprobs_BT = tokens.logprobs_BT
  means_BT = segments.means(
    ratios.log_ratios(logprobs_BT, tokens.proximal_logprobs_BT),
    tokens.loss_mask_BT,
    tokens.segment_ids_BT,
  )
  own_BT = jnp.exp(logprobs_BT - jax.lax.stop_gradient(logprobs_BT))
  ratios_BT = jnp.exp(jax.lax.stop_gradient(means_BT)) * own_BT
  return _clipped(ratios_BT, tokens.advantages_BT, clip_low, clip_high)


def cispo(
  tokens: Tokens, *, clip_low: float, clip_high: float
) -> tuple[Float[jax.Array, "B T"], Bounds]:
  """loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi.

  The weight is clipped, not the gain: every token keeps a gradient.
  Source: MiniMax-M1, CISPO (https://arxiv.org/abs/2506.13585).
  """
  ratios_BT = jax.lax.stop_gradient(_ratios(tokens))
  weights_BT = jnp.clip(ratios_BT, 1.0 - clip_low, 1.0 + clip_high)
  bounds = Bounds(
    is_low_BT=ratios_BT < 1.0 - clip_low, is_high_BT=ratios_BT > 1.0 + clip_high
  )
  return -weights_BT * tokens.advantages_BT * tokens.logprobs_BT, bounds


def aipo(
  tokens: Tokens, *, weight_cap: float
) -> tuple[Float[jax.Array, "B T"], Bounds]:
  """loss = -sg(min(r, weight_cap)) A log pi.

  Source: LlamaRL, section on AIPO (https://arxiv.org/abs/2505.24034).
  """
  ratios_BT = jax.lax.stop_gradient(_ratios(tokens))
  weights_BT = jnp.minimum(ratios_BT, weight_cap)
  bounds = Bounds(
    is_low_BT=jnp.zeros(ratios_BT.shape, bool),
    is_high_BT=ratios_BT > weight_cap,
  )
  return -weights_BT * tokens.advantages_BT * tokens.logprobs_BT, bounds


def vtrace(
  tokens: Tokens, *, weight_cap: float
) -> tuple[Float[jax.Array, "B T"], Bounds]:
  """loss_t = -sg(rho_t c_{t+1} ... c_{n-1} rho_n) A log pi_t, n the last token.

  rho = min(r, weight_cap), c = min(r, 1). That is V-trace's policy gradient
  rho_t (v_{t+1} - b) with a reward at the end alone and one baseline b for the
  whole sequence, so that A = reward - b: a token counts by how far the policy
  would still have gone on to the end. At the last token the weight is rho_n.
  Source: IMPALA, equations 1 and 4 (https://arxiv.org/abs/1802.01561); for a
  learned baseline see returns.vtrace.
  """
  logs_BT = jax.lax.stop_gradient(
    ratios.log_ratios(tokens.logprobs_BT, tokens.proximal_logprobs_BT)
  )
  cap = jnp.log(jnp.asarray(weight_cap, logs_BT.dtype))
  ids_BT = tokens.segment_ids_BT
  later_BT = segments.later_sums(jnp.minimum(logs_BT, 0.0), ids_BT)
  # The last token's rho stands in place of its c, at all tokens before it.
  num_later_BT = segments.later_sums(tokens.loss_mask_BT, ids_BT)
  is_last_BT = (tokens.loss_mask_BT > 0.0) & (num_later_BT == 0.0)
  excess_BT = jnp.where(is_last_BT, jnp.clip(logs_BT, 0.0, cap), 0.0)
  later_BT += segments.later_sums(excess_BT, ids_BT)
  weights_BT = jnp.exp(jnp.minimum(logs_BT, cap) + later_BT)
  bounds = Bounds(
    is_low_BT=jnp.zeros(logs_BT.shape, bool), is_high_BT=logs_BT > cap
  )
  return -weights_BT * tokens.advantages_BT * tokens.logprobs_BT, bounds


def dppo_tv(
  tokens: Tokens, *, divergence: float, weight_cap: float
) -> tuple[Float[jax.Array, "B T"], Bounds]:
  """loss = -sg(min(r, weight_cap)) A log pi, or 0 beyond the trust region.

  A token is beyond it where A > 0 and pi - prox > divergence, or A < 0 and
  pi - prox < -divergence: the difference of probabilities bounds the total
  variation, which a ratio overrates at unlikely tokens and underrates at
  likely ones.
  Source: DPPO, Binary-TV (https://arxiv.org/abs/2602.04879).
  """
  ratios_BT = jax.lax.stop_gradient(_ratios(tokens))
  advantages_BT = tokens.advantages_BT
  moved_BT = jax.lax.stop_gradient(
    jnp.exp(tokens.logprobs_BT) - jnp.exp(tokens.proximal_logprobs_BT)
  )
  bounds = Bounds(
    is_low_BT=(advantages_BT < 0.0) & (moved_BT < -divergence),
    is_high_BT=(advantages_BT > 0.0) & (moved_BT > divergence),
  )
  weights_BT = jnp.minimum(ratios_BT, weight_cap)
  weights_BT = jnp.where(bounds.is_low_BT | bounds.is_high_BT, 0.0, weights_BT)
  return -weights_BT * advantages_BT * tokens.logprobs_BT, bounds


def supervised(
  logprobs_BT: Float[jax.Array, "B T"],
) -> Float[jax.Array, "B T"]:
  """Negates the log-likelihood of each token, in nats."""
  return -logprobs_BT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """A loss that a config can name.

  Attributes:
    function: its keyword arguments are fields of the objective.
    is_bounded: whether its own ratio bounds what stale samples can do.
  """

  function: Loss
  is_bounded: bool = True


LOSSES: Mapping[str, Entry] = {
  "reinforce": Entry(function=reinforce, is_bounded=False),
  "ppo_clip": Entry(function=ppo_clip),
  "dual_clip": Entry(function=dual_clip),
  "gspo": Entry(function=gspo),
  "cispo": Entry(function=cispo),
  "aipo": Entry(function=aipo),
  "vtrace": Entry(function=vtrace),
  "dppo_tv": Entry(function=dppo_tv),
}


def _ratios(tokens: Tokens) -> Float[jax.Array, "B T"]:
  return jnp.exp(
    ratios.log_ratios(tokens.logprobs_BT, tokens.proximal_logprobs_BT)
  )


def _clipped(
  ratios_BT: Float[jax.Array, "B T"],
  advantages_BT: Float[jax.Array, "B T"],
  clip_low: float,
  clip_high: float,
) -> tuple[Float[jax.Array, "B T"], Bounds]:
  clipped_BT = jnp.clip(ratios_BT, 1.0 - clip_low, 1.0 + clip_high)
  loss_BT = -jnp.minimum(ratios_BT * advantages_BT, clipped_BT * advantages_BT)
  bounds = Bounds(
    is_low_BT=(advantages_BT < 0.0) & (ratios_BT < 1.0 - clip_low),
    is_high_BT=(advantages_BT > 0.0) & (ratios_BT > 1.0 + clip_high),
  )
  return loss_BT, bounds
