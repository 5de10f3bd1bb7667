"""A small random model learns to spell words backward, on a laptop's CPU."""

import string

from configs import common


def get_config():
  """Returns the config that `make quickstart` runs."""
  config = common.get_config()
  config.model.width = 128
  config.model.mlp_width = 256
  config.model.num_layers = 2
  config.model.num_heads = 4
  config.model.num_kv_heads = 2
  config.model.head_width = 32
  config.tokenizer.alphabet = ">" + string.ascii_letters
  config.task.source = "reasoning_gym"
  config.task.name = "spell_backward"
  config.task.params = {"min_word_len": 3, "max_word_len": 5}
  config.task.size = 12000
  # The word alone, where the generator would ask for it in a sentence.
  config.task.columns.question = "word"
  config.task.template = "{question}>"
  config.task.num_heldout = 200
  config.task.max_prompt_tokens = 6
  config.task.reward = "reasoning_gym"
  config.cold_start.steps = 300
  config.cold_start.batch_size = 64
  config.cold_start.lr = 1e-3
  config.mesh.host_devices = 3
  config.mesh.num_generators = 2
  config.mesh.lanes = 2
  config.generator.slots = 16
  config.generator.page_size = 4
  config.generator.max_length = 14
  config.generator.max_new_tokens = 8
  config.generator.chunk_steps = 2
  config.coordinator.schedule = "dora"
  config.coordinator.max_staleness = 2
  config.coordinator.prompts_per_batch = 8
  config.coordinator.group_size = 8
  config.coordinator.num_steps = 100
  config.trainer.lr = 3e-4
  config.trainer.row_length = 48
  config.trainer.rows_per_batch = 16
  config.evaluation.every_steps = 20
  config.evaluation.num_prompts = 200
  config.evaluation.temperature = 1.0
  return config
