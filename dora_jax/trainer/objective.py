"""The policy's objective: which loss, around what, corrected and summed how.

The one place where names of config.trainer become functions. The train step
knows none of them. Published objectives in these names; what is not said is
"behavior", "none", and as the sources have their bounds:

  PPO            ppo_clip; advantage gae
  GRPO           ppo_clip, sequence_mean, k3; advantage grpo
  DAPO           ppo_clip with clip_high 0.28, token_mean; overlong_penalty,
                 coordinator.filter_groups
  Dr. GRPO       ppo_clip, constant; advantage dr_grpo
  DORA's paper   ppo_clip, sequence_mean
  LongCat-Flash-Thinking
                 dual_clip, recomputed, tis, constant; mask_truncated,
                 coordinator.filter_groups
  LongCat-Flash-Prover
                 dual_clip, recomputed, hispo, constant
  decoupled PPO  ppo_clip, current (AReaL) or loglinear (A-3PO), tis
  IMPALA         aipo; advantage vtrace; without a critic, loss vtrace
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from dora_jax.trainer import aggregation, losses, ratios, regularizers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
  """Choices and their options; those that a choice does not take lie idle.

  Attributes:
    loss: a name of losses.LOSSES.
    proximal: a name of ratios.PROXIMAL.
    correction: a name of ratios.CORRECTIONS.
    aggregation: a name of aggregation.AGGREGATIONS.
    kl: "none" or a name of regularizers.ESTIMATES.
    kl_coefficient: of the KL to the reference, which is added to the loss.
    entropy_coefficient: of the entropy in nats, which is taken from the loss.
    clip_low: see losses.ppo_clip.
    clip_high: see losses.ppo_clip.
    clip_loss: see losses.dual_clip.
    divergence: see losses.dppo_tv.
    weight_floor: smallest importance weight of a token; see the corrections.
    weight_cap: largest importance weight of a token, that of a KL included.
    sequence_floor: smallest ratio of a sequence; see ratios.sequence_mask.
    sequence_cap: largest ratio of a sequence.
    constant_length: tokens of a sequence in the denominator of "constant".
  """

  loss: str
  proximal: str
  correction: str
  aggregation: str
  kl: str
  kl_coefficient: float
  entropy_coefficient: float
  clip_low: float
  clip_high: float
  clip_loss: float
  divergence: float
  weight_floor: float
  weight_cap: float
  sequence_floor: float
  sequence_cap: float
  constant_length: int

  @property
  def is_stale_proof(self) -> bool:
    """Whether something bounds or corrects for samples of older versions."""
    if self.proximal == "current":
      return self.correction != "none"
    return losses.LOSSES[self.loss].is_bounded

  @property
  def ratio_to_behavior(self) -> bool:
    """Whether the loss compares with who sampled, not the proximal policy.

    So HisPO does: there the recomputed policy only tells how far the engines
    differ, and the clip bounds that difference and the staleness together.
    """
    return self.correction == "hispo" and self.proximal == "recomputed"

  @property
  def takes_mixed(self) -> bool:
    """Whether tokens of one trajectory may come from several versions.

    Around the policy that sampled them, a mixture would be the trust region.
    """
    return self.proximal in ("current", "loglinear")


class Sampled(NamedTuple):
  """What is known of each token before the forward pass; constants.

  Where the mask is 0, all values but the ids must be 0.

  Attributes:
    behavior_logprobs_BT: as recorded at sampling time, in nats.
    advantages_BT: without unit.
    loss_mask_BT: 1.0 where the policy sampled the token.
    segment_ids_BT: which sequence of its row it belongs to.
    lags_BT: version being trained minus the one that sampled the token.
    recomputed_logprobs_BT: by the training forward at the version that sampled;
      None where the objective does not ask for it.
    ref_logprobs_BT: of the reference; None likewise.
  """

  behavior_logprobs_BT: Float[jax.Array, "B T"]
  advantages_BT: Float[jax.Array, "B T"]
  loss_mask_BT: Float[jax.Array, "B T"]
  segment_ids_BT: Int[jax.Array, "B T"]
  lags_BT: Int[jax.Array, "B T"]
  recomputed_logprobs_BT: Float[jax.Array, "B T"] | None = None
  ref_logprobs_BT: Float[jax.Array, "B T"] | None = None


class Seen(NamedTuple):
  """What the objective saw of each token; carries no gradient.

  It is read on the host, where its arrays are numpy's.

  Attributes:
    log_ratios_BT: of pi / behav, clamped, in nats.
    kl_BT: the estimated KL to the reference, in nats; None where there is none.
    is_clipped_low_BT: see losses.Bounds.
    is_clipped_high_BT: see losses.Bounds.
    is_capped_BT: see ratios.Weights.
    is_masked_BT: see ratios.Weights.
  """

  log_ratios_BT: Float[Any, "B T"]
  kl_BT: Float[Any, "B T"] | None
  is_clipped_low_BT: Bool[Any, "B T"]
  is_clipped_high_BT: Bool[Any, "B T"]
  is_capped_BT: Bool[Any, "B T"]
  is_masked_BT: Bool[Any, "B T"]


def weighted_sum(
  logprobs_BT: Float[jax.Array, "B T"],
  entropies_BT: Float[jax.Array, "B T"],
  sampled: Sampled,
  objective: Objective,
) -> tuple[Float[jax.Array, ""], Seen]:
  """The loss before it is divided by the denominator of the whole step.

  Sum over sampled tokens of weight * (w * loss + kl_coefficient * KL
  - entropy_coefficient * entropy): weight by the aggregation, w by the
  correction.

  Args:
    logprobs_BT: under the params being trained, in nats.
    entropies_BT: of the distributions that drew the tokens, in nats.
    sampled: what else is known of them.
    objective: what to make of it.
  """
  mask_BT = sampled.loss_mask_BT
  # Cut before the loss, for a NaN in a masked token would reach the gradient
  # through a mask that comes after it.
  logprobs_BT = jnp.where(mask_BT > 0.0, logprobs_BT, 0.0)
  entropies_BT = jnp.where(mask_BT > 0.0, entropies_BT, 0.0)
  loss_BT, seen = _policy_losses(logprobs_BT, sampled, objective)
  if objective.kl != "none":
    kl_BT = _kl(logprobs_BT, seen.log_ratios_BT, sampled, objective)
    loss_BT = loss_BT + objective.kl_coefficient * kl_BT
    seen = seen._replace(kl_BT=jax.lax.stop_gradient(kl_BT))
  loss_BT = loss_BT - objective.entropy_coefficient * entropies_BT
  weights_BT = aggregation.token_weights(
    objective.aggregation, mask_BT, sampled.segment_ids_BT
  )
  return aggregation.weighted_sum(loss_BT, weights_BT, mask_BT), seen


def _policy_losses(
  logprobs_BT: Float[jax.Array, "B T"], sampled: Sampled, objective: Objective
) -> tuple[Float[jax.Array, "B T"], Seen]:
  """Corrected losses of the tokens."""
  proximal_BT = ratios.proximal(
    objective.proximal,
    logprobs_BT,
    sampled.behavior_logprobs_BT,
    sampled.recomputed_logprobs_BT,
    sampled.lags_BT,
  )
  loss = losses.LOSSES[objective.loss].function
  loss_BT, bounds = loss(
    losses.Tokens(
      logprobs_BT=logprobs_BT,
      proximal_logprobs_BT=sampled.behavior_logprobs_BT
      if objective.ratio_to_behavior
      else proximal_BT,
      advantages_BT=sampled.advantages_BT,
      loss_mask_BT=sampled.loss_mask_BT,
      segment_ids_BT=sampled.segment_ids_BT,
    ),
    **_options(loss, objective),
  )
  correct = ratios.CORRECTIONS[objective.correction]
  weights = correct(
    ratios.Gaps(
      log_weights_BT=ratios.log_ratios(
        proximal_BT, sampled.behavior_logprobs_BT
      ),
      loss_mask_BT=sampled.loss_mask_BT,
      segment_ids_BT=sampled.segment_ids_BT,
    ),
    **_options(correct, objective),
  )
  log_ratios_BT = jax.lax.stop_gradient(
    ratios.log_ratios(logprobs_BT, sampled.behavior_logprobs_BT)
  )
  seen = Seen(
    log_ratios_BT=log_ratios_BT,
    kl_BT=None,
    is_clipped_low_BT=bounds.is_low_BT,
    is_clipped_high_BT=bounds.is_high_BT,
    is_capped_BT=weights.is_capped_BT,
    is_masked_BT=weights.is_masked_BT,
  )
  return weights.weights_BT * loss_BT, seen


def _kl(
  logprobs_BT: Float[jax.Array, "B T"],
  log_ratios_BT: Float[jax.Array, "B T"],
  sampled: Sampled,
  objective: Objective,
) -> Float[jax.Array, "B T"]:
  """The estimated KL to the reference, in nats."""
  assert sampled.ref_logprobs_BT is not None
  return regularizers.ESTIMATES[objective.kl](
    ratios.log_ratios(logprobs_BT, sampled.ref_logprobs_BT),
    jnp.minimum(jnp.exp(log_ratios_BT), objective.weight_cap),
  )


def _options(function: Callable[..., Any], objective: Objective) -> dict:
  """The fields of the objective that a function takes by keyword."""
  parameters = inspect.signature(function).parameters.values()
  return {
    each.name: getattr(objective, each.name)
    for each in parameters
    if each.kind is inspect.Parameter.KEYWORD_ONLY
  }
