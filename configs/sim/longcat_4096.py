"""A mixture of 560B on 4,096 accelerators: the paper in production.

  source    the LongCat-Flash reports and DORA, arXiv 2604.26256, section 6:
            560B weights, 4,096 accelerators, 64K tokens; the rest is guessed
  command   python -m dora_jax.simulate --config=configs/sim/longcat_4096.py
  time      24 s of one CPU core
  result    251 s a step, of it 92 s training and 135 s waiting for the oldest
            request of 64K tokens: with K = 3 a step takes no less

32,768 trajectories are in flight, and steps take 8,192 of them.
"""

from configs.sim import common


def get_config():
  """Returns the config."""
  config = common.get_config()
  config.model.name = "longcat-flash"
  config.model.number_bytes = 1.0
  config.cluster.accelerator = "H800"
  config.cluster.devices = 4096
  config.cluster.trainer_devices = 512
  config.generator.devices = 16
  config.generator.slots = 160
  config.generator.chunk_steps = 32
  config.generator.progress_s = 60.0
  config.cost.imbalance = 1.3
  config.workload.mean_length = 8000.0
  config.workload.sigma = 1.0
  config.workload.max_length = 65_536
  config.workload.prompt_tokens = 300
  config.coordinator.max_staleness = 3
  config.coordinator.prompts_per_batch = 512
  config.coordinator.group_size = 16
  config.coordinator.rollout_groups = "2048"
  config.coordinator.num_steps = 20
  return config
