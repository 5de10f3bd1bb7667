"""A run so small that a test can make several of them."""

import pathlib
from typing import Any

from configs import common
from dora_jax import config as config_lib
from dora_jax import main


def config(**changes: Any):
  """One-digit sums for a one-layer model; `changes` are "section.field"."""
  made: Any = common.get_config()
  made.model.width = 16
  made.model.mlp_width = 32
  made.model.num_layers = 1
  made.model.num_heads = 2
  made.model.num_kv_heads = 1
  made.model.head_width = 8
  made.task.params = {"max_term": 5}
  made.task.template = "{question}="
  made.task.num_heldout = 4
  made.task.max_prompt_tokens = 8
  made.task.reward_timeout_s = 60.0
  made.mesh.num_generators = 2
  made.generator.slots = 4
  made.generator.page_size = 4
  made.generator.max_length = 12
  made.generator.max_new_tokens = 4
  made.generator.chunk_steps = 2
  made.coordinator.max_staleness = 1
  made.coordinator.prompts_per_batch = 2
  made.coordinator.group_size = 4
  made.coordinator.num_steps = 3
  made.trainer.lr = 1e-2
  made.trainer.row_length = 24
  made.trainer.rows_per_batch = 2
  made.trainer.logprob_chunk = 24
  made.evaluation.num_prompts = 4
  made.evaluation.temperature = 1.0
  with made.unlocked():
    made.update_from_flattened_dict(
      {name.replace("__", "."): value for name, value in changes.items()}
    )
  return made


def run(made, workdir: pathlib.Path) -> int:
  """Runs a config in this process; returns the exit status."""
  config_lib.validate(made, num_devices=8)
  return main.run(made, workdir, command="test")
