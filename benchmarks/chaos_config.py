"""A run so small that hundreds can be killed: one epoch of 14 prompts.

Stragglers are long and generators two, so that requests move; every step is
saved. The reward misbehaves where benchmarks/chaos.py says so.
"""

from typing import Any

from configs import common

NUM_PROMPTS = 14


def get_config():
  """Returns the config that every schedule runs."""
  config: Any = common.get_config()
  config.model.width = 16
  config.model.mlp_width = 32
  config.model.num_layers = 1
  config.model.num_heads = 2
  config.model.num_kv_heads = 1
  config.model.head_width = 8
  config.task.params = {"max_term": 3}
  config.task.template = "{question}="
  config.task.num_heldout = 2
  config.task.num_epochs = 1
  config.task.max_prompt_tokens = 8
  config.task.reward = "benchmarks.chaos_rewards:judge"
  config.task.reward_timeout_s = 4.0
  config.mesh.host_devices = 3
  config.mesh.num_generators = 2
  config.generator.slots = 8
  config.generator.page_size = 8
  config.generator.max_length = 56
  config.generator.max_new_tokens = 48
  config.generator.chunk_steps = 1
  config.coordinator.max_staleness = 2
  config.coordinator.prompts_per_batch = 2
  config.coordinator.group_size = 4
  # More than the data gives: the run ends with its epoch.
  config.coordinator.num_steps = 20
  config.coordinator.balance_period_s = 0.02
  config.trainer.lr = 1e-2
  config.trainer.row_length = 56
  config.trainer.rows_per_batch = 2
  config.trainer.logprob_chunk = 56
  config.checkpoint.every_steps = 1
  return config
