"""Turns the rewards of groups into advantages.

Groups are told apart as such, never by position in a flat array, and may differ
in size. Whoever is left out of the loss (shaping.py) still has its say in the
baseline.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

# Groups need not be of one size, so members bear no name.
Rewards = Float[np.ndarray, "_"]

EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How advantages are found.

  Attributes:
    kind: a name of ADVANTAGES.
    pass_k: see `pass_at_k`; the others do not read it.
    per_version: normalizes each version's groups by themselves where `kind`
      normalizes the batch; older versions may be better or worse than the
      newest. A group's own mean and deviation are of one version as they are.
  """

  kind: str
  pass_k: int
  per_version: bool


def grpo(rewards: Rewards, *, eps: float = EPS) -> Rewards:
  """(r - mean(r)) / (std(r) + eps), std that of the population.

  Source: DeepSeekMath, section 4.1.2 (https://arxiv.org/abs/2402.03300).
  """
  return _centered(rewards) / (rewards.std() + eps)


def dr_grpo(rewards: Rewards) -> Rewards:
  """r - mean(r): no group counts for more because its rewards hardly differ.

  Source: Dr. GRPO, section 3 (https://arxiv.org/abs/2503.20783).
  """
  return _centered(rewards)


def rloo(rewards: Rewards) -> Rewards:
  """r minus the mean of the other members, a baseline that is independent of r.

  That is M / (M - 1) * (r - mean(r)).
  Source: Ahmadian et al. (https://arxiv.org/abs/2402.14740).
  """
  return _centered(rewards) * (len(rewards) / (len(rewards) - 1))


def pass_at_k(rewards: Rewards, *, pass_k: int) -> Rewards:
  """What a member adds to the chance that one of pass_k members is right.

  Of the C(M, k) sets of k members, a share f = C(wrong, k) / C(M, k) holds no
  right one. Each set earns 1 or 0, normalized by their mean 1 - f and deviation
  sqrt(f (1 - f)); a member's advantage is the mean over the sets that it is in:

    right   f / sqrt(f (1 - f))
    wrong   (f - C(wrong - 1, k - 1) / C(M - 1, k - 1)) / sqrt(f (1 - f))

  A group in which no set or each set holds a right one has no signal: 0.
  Source: Pass@k Training, equations 14 and 15 (https://arxiv.org/abs/2508.10751).

  Raises:
    ValueError: a reward is neither 0 nor 1, or pass_k is not in 1 ... M.
  """
  num_members = len(rewards)
  if not np.isin(rewards, (0.0, 1.0)).all():
    raise ValueError(
      f"pass_at_k needs rewards of 0 or 1, found {rewards.tolist()}: change "
      "config.trainer.advantage or config.task.reward."
    )
  if not 1 <= pass_k <= num_members:
    raise ValueError(
      f"config.trainer.pass_k is {pass_k} but must be from 1 to the "
      f"{num_members} members of a group."
    )
  num_wrong = int((rewards == 0.0).sum())
  fails = math.comb(num_wrong, pass_k) / math.comb(num_members, pass_k)
  deviation = math.sqrt(fails * (1.0 - fails))
  if deviation == 0.0:
    return np.zeros(num_members)
  # With no wrong member there is no set without a right one, and so no signal.
  fails_with_me = math.comb(num_wrong - 1, pass_k - 1) / math.comb(
    num_members - 1, pass_k - 1
  )
  return np.where(rewards == 1.0, fails, fails - fails_with_me) / deviation


# Name -> function of one group's rewards.
_OF_GROUPS: Mapping[str, Callable[..., Rewards]] = {
  "grpo": grpo,
  "dr_grpo": dr_grpo,
  "rloo": rloo,
  "pass_at_k": pass_at_k,
}
# Name -> whether a group's mean is taken off before all groups are normalized.
_OF_BATCHES: Mapping[str, bool] = {
  "reinforce_pp": False,
  "reinforce_pp_baseline": True,
}
# By which critic.py judges single tokens.
BY_CRITIC = ("gae", "vtrace")
ADVANTAGES = (*_OF_GROUPS, *_OF_BATCHES, *BY_CRITIC)
# Names that compare the members of a group.
_NEEDS_GROUPS = {*ADVANTAGES} - {"reinforce_pp", *BY_CRITIC}


def advantages(
  rewards: Sequence[Rewards], versions: Sequence[int], settings: Settings
) -> list[Rewards]:
  """Advantages of all members of all groups of a step.

  Equal rewards in a group give exactly 0, except with "reinforce_pp", whose
  baseline is that of the batch, and with a critic.

  Args:
    rewards: of each group, one for each member, in the task's own units.
    versions: of each group, the policy version that sampled it.
    settings: how.

  Returns:
    For each group an array in float64, without unit. Where a critic judges, the
    rewards as they are: of these it makes the advantages of tokens.

  Raises:
    ValueError: a group of one member, or a reward that is not finite.
  """
  kind = settings.kind
  for group in rewards:
    _check(kind, group)
  rewards = [group.astype(np.float64) for group in rewards]
  if kind in BY_CRITIC:
    return rewards
  if kind in _OF_GROUPS:
    options = {"pass_k": settings.pass_k} if kind == "pass_at_k" else {}
    found = [_OF_GROUPS[kind](group, **options) for group in rewards]
    # Rounding of a mean would leave equal rewards with a tiny advantage.
    return [
      np.where(np.ptp(group) == 0.0, 0.0, values)
      for group, values in zip(rewards, found, strict=True)
    ]
  keys = list(versions) if settings.per_version else [0] * len(rewards)
  if _OF_BATCHES[kind]:
    rewards = [_centered(group) for group in rewards]
  return _reinforce_pp(rewards, keys)


def check(settings: Settings, *, group_size: int) -> None:
  """Refuses what no step could work with.

  Raises:
    ValueError: says what is found, what is needed, and the field to change.
  """
  kind, pass_k = settings.kind, settings.pass_k
  if kind not in ADVANTAGES:
    raise ValueError(
      f"config.trainer.advantage is {kind!r} but must be one of "
      f"{', '.join(map(repr, ADVANTAGES))}."
    )
  if group_size < 2 and kind in _NEEDS_GROUPS:
    raise ValueError(
      f"config.coordinator.group_size is {group_size} but must be at least 2 "
      f"where config.trainer.advantage is {kind!r}, which compares the members "
      "of a group."
    )
  if kind == "pass_at_k" and not 1 <= pass_k <= group_size:
    raise ValueError(
      f"config.trainer.pass_k is {pass_k} but must be from 1 to "
      f"config.coordinator.group_size, {group_size}."
    )


def _reinforce_pp(
  rewards: Sequence[Rewards], keys: Sequence[int]
) -> list[Rewards]:
  """(r - mean) / (std + EPS) over all trajectories of one key.

  Source: REINFORCE++ (https://arxiv.org/abs/2501.03262).
  """
  pools = {
    key: np.concatenate(
      [
        group
        for group, other in zip(rewards, keys, strict=True)
        if other == key
      ]
    )
    for key in set(keys)
  }
  return [
    np.zeros(len(group))
    if np.ptp(pools[key]) == 0.0
    else (group - pools[key].mean()) / (pools[key].std() + EPS)
    for group, key in zip(rewards, keys, strict=True)
  ]


def _centered(rewards: Rewards) -> Rewards:
  if np.ptp(rewards) == 0.0:
    return np.zeros(len(rewards))
  return rewards - rewards.mean()


def _check(kind: str, rewards: Rewards) -> None:
  if len(rewards) < 2 and kind in _NEEDS_GROUPS:
    raise ValueError(
      f"Groups have {len(rewards)} member(s), but the advantage {kind!r} "
      "needs at least 2: raise config.coordinator.group_size."
    )
  if not np.isfinite(rewards).all():
    raise ValueError(
      f"Rewards must be finite, found {rewards.tolist()}: mend the reward "
      "function (config.task.reward)."
    )
