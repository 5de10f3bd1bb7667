"""A small virtual cluster, whose times can be worked out by hand."""

from typing import Any

from configs.sim import common
from dora_jax.simulator import costs, pieces, roofline, world

EFFICIENCIES = roofline.Efficiencies(
  bandwidth=0.5,
  flops=0.5,
  training=0.5,
  link=0.5,
  imbalance=1.0,
  step_fixed_s=0.001,
  train_fixed_s=0.0,
  switch_fixed_s=0.0,
  move_fixed_s=0.0,
  message_s=0.0,
)


def make_costs(**changes: float) -> costs.Costs:
  """A decode step takes 1 ms, a training step 100 ms, most else nothing."""
  values = {
    "step_fixed_s": 0.0005,
    "weights_read_s": 0.0005,
    "kv_token_read_s": 0.0,
    "request_flops_s": 0.0,
    "kv_token_flops_s": 0.0,
    "prefill_token_s": 0.0,
    "train_token_s": 0.0,
    "train_fixed_s": 0.1,
    "publish_s": 0.0,
    "load_s": 0.0,
    "move_fixed_s": 0.0,
    "kv_token_move_s": 0.0,
    "kv_token_spill_s": 0.0,
    "switch_s": 0.0,
    "message_s": 0.0,
  }
  return costs.Costs(**{**values, **changes})


def make_config(**changes: Any) -> Any:
  """Two generators of 16 slots, 8 groups of 4 a step; section__field=value."""
  config: Any = common.get_config()
  config.model.name = "tiny"
  config.cluster.accelerator = "cpu"
  config.cluster.devices = 3
  config.cluster.trainer_devices = 1
  config.generator.slots = 16
  config.generator.chunk_steps = 1
  config.generator.kv_tokens = 10_000_000
  config.generator.progress_s = 0.05
  config.workload.mean_length = 48.0
  config.workload.sigma = 1.2
  config.workload.max_length = 512
  config.workload.prompt_tokens = 32
  config.coordinator.max_staleness = 3
  config.coordinator.prompts_per_batch = 8
  config.coordinator.group_size = 4
  config.coordinator.num_steps = 8
  config.coordinator.balance_period_s = 0.05
  config.measure.warmup_steps = 2
  config.measure.cooldown_steps = 2
  for name, value in changes.items():
    section, field = name.split("__")
    config[section][field] = value
  return config


def run(config: Any, **cost_changes: float) -> world.World:
  """Runs a config with these costs to its end."""
  made = pieces.make_world(config, cost=make_costs(**cost_changes))
  assert made.run() == "finished"
  return made
