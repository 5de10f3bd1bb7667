"""Advantages and targets from a critic: pure functions on packed rows.

Index t speaks of the token at t: values_BT[t] is the critic's estimate before
that token is drawn, rewards_BT[t] what drawing it earns. Recursions run from
each sampled token to the next one of its segment; tokens in between that the
policy did not sample (the environment's) are passed over.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from dora_jax.trainer import ratios


class Estimates(NamedTuple):
  """What a critic makes of sampled tokens; 0 elsewhere, constants.

  Attributes:
    advantages_BT: in the units of the rewards.
    targets_BT: what the critic is to learn, in the same units.
  """

  advantages_BT: Float[jax.Array, "B T"]
  targets_BT: Float[jax.Array, "B T"]


def gae(
  rewards_BT: Float[jax.Array, "B T"],
  values_BT: Float[jax.Array, "B T"],
  loss_mask_BT: Float[jax.Array, "B T"],
  segment_ids_BT: Int[jax.Array, "B T"],
  *,
  discount: float,
  trace_decay: float,
) -> Estimates:
  """Generalized advantage estimation, the trajectory's end being terminal.

  A_t = delta_t + discount * trace_decay * A_{t+1}, and
  delta_t = r_t + discount * V_{t+1} - V_t; the target is A_t + V_t.
  Source: Schulman et al., equation 16 (https://arxiv.org/abs/1506.02438).
  """

  def step(following, token):
    advantage_B, value_B = following
    reward_B, own_value_B, _ = token
    delta_B = reward_B + discount * value_B - own_value_B
    advantage_B = delta_B + discount * trace_decay * advantage_B
    return (advantage_B, own_value_B), (advantage_B, advantage_B + own_value_B)

  return _backward(
    step,
    (rewards_BT, values_BT, jnp.zeros_like(values_BT)),
    loss_mask_BT,
    segment_ids_BT,
  )


def vtrace(
  log_ratios_BT: Float[jax.Array, "B T"],
  rewards_BT: Float[jax.Array, "B T"],
  values_BT: Float[jax.Array, "B T"],
  loss_mask_BT: Float[jax.Array, "B T"],
  segment_ids_BT: Int[jax.Array, "B T"],
  *,
  discount: float,
  weight_cap: float,
) -> Estimates:
  """V-trace targets v_t, and advantages r_t + discount * v_{t+1} - V_t.

  v_t = V_t + rho_t delta_t + discount * c_t * (v_{t+1} - V_{t+1}), with
  rho = min(pi / behav, weight_cap), c = min(pi / behav, 1), and delta as in
  `gae`. The policy's gradient weighs the advantages by rho, as losses.aipo
  does. On policy the advantages are those of `gae` with trace_decay 1.
  Source: IMPALA, equation 1 and section 4.2 (https://arxiv.org/abs/1802.01561).

  Args:
    log_ratios_BT: log of pi / behav, in nats.
    rewards_BT: of each token, in the task's own units.
    values_BT: of the critic, in the same units.
    loss_mask_BT: 1.0 where the policy sampled the token.
    segment_ids_BT: which sequence of its row it belongs to.
    discount: of a reward for each token that it is later.
    weight_cap: rho-bar.
  """

  def step(following, token):
    excess_B, value_B = following  # v - V and V of the token after
    reward_B, own_value_B, log_ratio_B = token
    ratio_B = jnp.exp(log_ratio_B)
    delta_B = reward_B + discount * value_B - own_value_B
    advantage_B = delta_B + discount * excess_B
    excess_B = jnp.minimum(ratio_B, weight_cap) * delta_B + (
      discount * jnp.minimum(ratio_B, 1.0) * excess_B
    )
    return (excess_B, own_value_B), (advantage_B, excess_B + own_value_B)

  limit = ratios.MAX_LOG_RATIO
  log_ratios_BT = jnp.clip(log_ratios_BT, -limit, limit)
  return _backward(
    step,
    (rewards_BT, values_BT, log_ratios_BT),
    loss_mask_BT,
    segment_ids_BT,
  )


def value_loss(
  values_BT: Float[jax.Array, "B T"],
  old_values_BT: Float[jax.Array, "B T"],
  targets_BT: Float[jax.Array, "B T"],
  *,
  value_clip: float,
) -> Float[jax.Array, "B T"]:
  """max((V - G)^2, (V_clipped - G)^2) / 2, the critic's loss of each token.

  V_clipped lies within value_clip of the value before the step, so that the
  critic earns nothing by going farther; inf never clips.
  Source: PPO's reference implementation
  (https://github.com/openai/baselines, ppo2/model.py).
  """
  old_values_BT = jax.lax.stop_gradient(old_values_BT)
  targets_BT = jax.lax.stop_gradient(targets_BT)
  clipped_BT = old_values_BT + jnp.clip(
    values_BT - old_values_BT, -value_clip, value_clip
  )
  return 0.5 * jnp.maximum(
    jnp.square(values_BT - targets_BT), jnp.square(clipped_BT - targets_BT)
  )


def _backward(step, arrays, loss_mask_BT, segment_ids_BT) -> Estimates:
  """Runs `step` over the sampled tokens of each segment, last to first."""

  def guarded(carry, column):
    following, carried_ids_B = carry
    token, mask_B, ids_B = column
    # What follows the last token of a segment is worth nothing.
    following = tuple(
      jnp.where(ids_B == carried_ids_B, x_B, 0.0) for x_B in following
    )
    new, estimates = step(following, token)
    is_sampled_B = mask_B > 0.0
    kept = tuple(
      jnp.where(is_sampled_B, x_B, y_B)
      for x_B, y_B in zip(new, following, strict=True)
    )
    estimates = tuple(jnp.where(is_sampled_B, x_B, 0.0) for x_B in estimates)
    return (kept, ids_B), estimates

  arrays = tuple(jax.lax.stop_gradient(x_BT) for x_BT in arrays)
  zeros_B = jnp.zeros_like(arrays[0][:, 0])
  start = ((zeros_B, zeros_B), segment_ids_BT[:, -1])
  columns = jax.tree.map(jnp.transpose, (arrays, loss_mask_BT, segment_ids_BT))
  _, (advantages_TB, targets_TB) = jax.lax.scan(
    guarded, start, columns, reverse=True
  )
  return Estimates(advantages_BT=advantages_TB.T, targets_BT=targets_TB.T)
