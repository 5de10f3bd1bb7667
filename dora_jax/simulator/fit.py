"""Finds the two efficiencies that make one case take as long as published.

Training is fitted to what of the step is no rollout, the memory bandwidth of
decoding to the rollout. All else is predicted.
"""

import math
from collections.abc import Mapping
from typing import Any

from dora_jax.simulator import pieces, sweep

Config = Any
_NUM_HALVINGS = 14


def efficiencies(
  config: Config, setting: sweep.Setting, published: Mapping[str, float]
) -> dict[str, float]:
  """Fits config.cost.training and config.cost.bandwidth.

  Args:
    config: of the simulation.
    setting: the case to fit, whose rollout nothing hides (sync).
    published: its step_s and rollout_not_hidden_s.

  Returns:
    The values of the two fields.
  """
  train_s = published["step_s"] - published["rollout_not_hidden_s"]
  chosen = sweep.changed(config, setting.overrides)
  cost = pieces.make_costs(chosen)
  fixed_s = cost.train_s(0)
  if chosen.cluster.colocated:
    fixed_s += 2 * cost.switch_s
  predicted_s = pieces.simulate(chosen)["train_s"]
  training = (
    config.cost.training * (predicted_s - fixed_s) / (train_s - fixed_s)
  )
  low, high = 0.02, 1.0
  for _ in range(_NUM_HALVINGS):
    middle = math.sqrt(low * high)
    with chosen.unlocked():
      chosen.cost.training, chosen.cost.bandwidth = training, middle
    rollout_s = pieces.simulate(chosen)["rollout_not_hidden_s"]
    if rollout_s > published["rollout_not_hidden_s"]:
      low = middle
    else:
      high = middle
  return {"cost.training": training, "cost.bandwidth": high}
