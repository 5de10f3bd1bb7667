"""Turns the rewards of a group into advantages."""

import numpy as np
from jaxtyping import Float

EPS = 1e-6


def group_advantages(
  rewards_PM: Float[np.ndarray, "P M"], *, eps: float = EPS
) -> Float[np.ndarray, "P M"]:
  """Centers each group's rewards and scales them by the group's deviation.

  A[p, m] = (r[p, m] - mean(r[p])) / (std(r[p]) + eps)

  A group whose members all got one reward carries no signal: its A is exactly
  zero. std is that of the population (divided by M).
  Source: DeepSeekMath, section 4.1.2 (https://arxiv.org/abs/2402.03300).

  Args:
    rewards_PM: one scalar per trajectory, in the task's own units.
    eps: added to the deviation, in the same units as the rewards.

  Returns:
    Advantages in float64, without unit; their mean over each group is zero.

  Raises:
    ValueError: groups of one member, or a reward that is not finite.
  """
  if rewards_PM.shape[1] < 2:
    raise ValueError(
      f"Groups have {rewards_PM.shape[1]} member(s), but a group-relative "
      "advantage needs at least 2: raise config.coordinator.group_size."
    )
  if not np.isfinite(rewards_PM).all():
    raise ValueError(
      f"Rewards must be finite, found {rewards_PM.tolist()}: mend the reward "
      "function (config.task.reward)."
    )
  rewards_PM = rewards_PM.astype(np.float64)
  centered_PM = rewards_PM - rewards_PM.mean(axis=1, keepdims=True)
  scaled_PM = centered_PM / (rewards_PM.std(axis=1, keepdims=True) + eps)
  # Rounding of the mean would leave equal rewards with a tiny common advantage.
  is_even_P1 = np.ptp(rewards_PM, axis=1, keepdims=True) == 0.0
  return np.where(is_even_P1, 0.0, scaled_PM)
