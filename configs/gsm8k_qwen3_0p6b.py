"""Qwen3-0.6B learns the word problems of GSM8K; for 4 or more GPUs or chips.

  source    GSM8K (https://arxiv.org/abs/2110.14168), models/ and data/ as below
  command   python -m dora_jax.main --config=configs/gsm8k_qwen3_0p6b.py \\
              --workdir=runs/gsm8k
  result    not run yet on the hardware that it is for; `make slow` runs its
            first two steps with a tiny random model in place
"""

from configs import common


def get_config():
  """Returns the config; put the model's and the data's folders in place."""
  config = common.get_config()
  config.model.source = "huggingface"
  config.model.folder = "models/Qwen3-0.6B"
  config.model.compute_dtype = "bfloat16"
  config.tokenizer.kind = "huggingface"
  config.tokenizer.folder = "models/Qwen3-0.6B"
  config.task.source = "jsonl"
  config.task.path = "data/gsm8k/train.jsonl"
  config.task.heldout_path = "data/gsm8k/test.jsonl"
  config.task.extract = "gsm8k"
  config.task.template = (
    "{question}\nReason step by step, "
    "and put your final answer within \\boxed{}."
  )
  config.task.chat = True
  config.task.num_heldout = 256
  config.task.max_prompt_tokens = 512
  config.task.on_long_prompt = "skip"
  config.task.reward = "math_verify"
  config.task.reward_workers = 8
  config.mesh.trainer_fsdp = 2
  config.mesh.num_generators = 2
  config.mesh.lanes = 2
  config.generator.slots = 64
  config.generator.page_size = 64
  config.generator.max_length = 2560
  config.generator.max_new_tokens = 2048
  config.generator.chunk_steps = 16
  config.generator.dtype = "bfloat16"
  config.coordinator.schedule = "dora"
  config.coordinator.max_staleness = 2
  config.coordinator.prompts_per_batch = 64
  config.coordinator.group_size = 8
  config.coordinator.num_steps = 200
  config.trainer.lr = 1e-6
  config.trainer.warmup_steps = 10
  config.trainer.b2 = 0.99
  config.trainer.clip_high = 0.28
  config.trainer.row_length = 4096
  config.trainer.rows_per_batch = 4
  config.trainer.remat = True
  config.trainer.logprob_chunk = 512
  config.evaluation.every_steps = 20
  config.evaluation.num_prompts = 256
  config.evaluation.temperature = 1.0
  config.runtime.canary_tolerance = 0.5
  config.runtime.stall_s = 300.0
  return config
