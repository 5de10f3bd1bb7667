"""A small random model learns to write numbers backward, on a laptop's CPU.

It first imitates demonstrations of which 4 in 10 show another number's answer,
so it is right half of the time at best. Imitation could do no better;
reinforcement learning does, by what its own samples earn.

  source    strings of 3 to 5 digits, drawn by seed; 200 are held out
  command   make quickstart
  time      33.7 s on 2 CPU cores, and 25 s to start; the installation before
            takes about a minute
  result    held out, at temperature 1: 36.0 % before, 97.0 % after 100 steps,
            in four other runs 91.0 to 96.5 %; three versions alive at most,
            lag 1.9 on average, 2 at most
"""

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
  config.tokenizer.alphabet = ">" + string.digits
  config.task.source = "reversal"
  config.task.params = {
    "alphabet": string.digits,
    "min_length": 3,
    "max_length": 5,
  }
  config.task.size = 12_000
  config.task.template = "{question}>"
  config.task.num_heldout = 200
  config.task.max_prompt_tokens = 6
  config.task.reward = "exact_match"
  config.cold_start.steps = 350
  config.cold_start.lr = 2e-3
  config.cold_start.wrong_share = 0.4
  # One device trains, two generate; each of these serves two versions in turn.
  config.mesh.host_devices = 3
  config.mesh.num_generators = 2
  config.mesh.lanes = 2
  config.generator.slots = 32
  config.generator.page_size = 16
  config.generator.max_length = 14
  config.generator.max_new_tokens = 8
  config.generator.chunk_steps = 2
  config.coordinator.schedule = "dora"
  config.coordinator.max_staleness = 2
  config.coordinator.prompts_per_batch = 16
  config.coordinator.group_size = 8
  config.coordinator.num_steps = 100
  config.trainer.lr = 3e-4
  config.trainer.warmup_steps = 10
  config.trainer.row_length = 60
  config.trainer.rows_per_batch = 12
  config.evaluation.every_steps = 20
  config.evaluation.num_prompts = 200
  config.evaluation.temperature = 1.0
  return config
