"""What of a trajectory counts: shaped rewards, and who is left out of the loss.

Rewards stay named components until they are summed here. What the task itself
paid is never changed: metrics, and the filter of groups, go by that.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float

from dora_jax import types


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaping:
  """How rewards are shaped.

  Attributes:
    weights: component of the reward function -> its weight in the reward.
    overlong_penalty: what a completion of max_length loses.
    overlong_buffer: see `overlong_penalty`.
    max_length: most tokens of a completion.
    masks_truncated: leaves completions that were cut at their longest out of
      the loss. Their rewards still belong to the baseline of their group.
  """

  weights: Mapping[str, float]
  overlong_penalty: float
  overlong_buffer: int
  max_length: int
  masks_truncated: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaped:
  """A group's rewards after shaping.

  Attributes:
    rewards: the sum of the components, in the task's own units.
    components: name -> what each member got of it; "task" is the reward itself.
    is_trained: whether the loss sees the member.
  """

  rewards: Float[np.ndarray, "M"]
  components: Mapping[str, Float[np.ndarray, "M"]]
  is_trained: Bool[np.ndarray, "M"]


def shape(group: types.Group, shaping: Shaping) -> Shaped:
  """Sums a group's components and says who is trained on.

  Raises:
    ValueError: the reward function returned no such component.
  """
  components = {"task": np.asarray(group.rewards, np.float64)}
  for name, weight in shaping.weights.items():
    if name not in group.components:
      raise ValueError(
        f"config.trainer.reward_weights names {name!r}, but the reward function"
        f" returned the components {sorted(group.components)}: change it or "
        "config.task.reward."
      )
    components[name] = weight * np.asarray(group.components[name], np.float64)
  if shaping.overlong_penalty > 0.0:
    lengths = np.array([len(t.completion) for t in group.trajectories])
    components["overlong"] = shaping.overlong_penalty * overlong_penalty(
      lengths, max_length=shaping.max_length, buffer=shaping.overlong_buffer
    )
  is_cut = [t.finish_reason == "length" for t in group.trajectories]
  return Shaped(
    rewards=np.sum(list(components.values()), axis=0),
    components=components,
    is_trained=~(np.array(is_cut) & shaping.masks_truncated),
  )


def overlong_penalty(
  lengths: np.ndarray, *, max_length: int, buffer: int
) -> Float[np.ndarray, "M"]:
  """From 0, `buffer` tokens before max_length, linearly to -1 at max_length.

  Source: DAPO, equation 13 (https://arxiv.org/abs/2503.14476).

  Args:
    lengths: of the completions, in tokens.
    max_length: of a completion.
    buffer: tokens over which the penalty grows, at least 1.
  """
  return -np.clip((lengths - (max_length - buffer)) / buffer, 0.0, 1.0)


def component_metrics(shaped: Sequence[Shaped]) -> dict[str, float]:
  """Means of the components over all trajectories, and who was left out."""
  names = shaped[0].components
  is_trained = np.concatenate([each.is_trained for each in shaped])
  return {
    "untrained_share": float(1.0 - is_trained.mean()),
    **{
      f"reward_component/{name}": float(
        np.concatenate([each.components[name] for each in shaped]).mean()
      )
      for name in names
    },
  }
