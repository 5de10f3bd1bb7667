"""Every field of a simulation's config with its one default.

A named config starts from these, as configs/common.py says of runs. The file is
found by its path:

  from configs.sim import common
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
  """Returns the defaults: a 7B model on 16 H100, half of them generate."""
  config = config_dict.ConfigDict()
  config.seed = 0  # of every draw
  config.model = _model()
  config.cluster = _cluster()
  config.generator = _generator()
  config.cost = _cost()
  config.workload = _workload()
  config.coordinator = _coordinator()
  config.faults = config_dict.ConfigDict()
  # Such as "600 lose 3", "900 join 1", "0 slow 2 1.5", "300 outage 120": at
  # which second, what, of whom, how much.
  config.faults.events = ()
  config.measure = _measure()
  # Name -> {section: {field: value}} that differs in it; none: the config
  # itself is what runs. A case is compared with what is published of its name.
  config.cases = config_dict.ConfigDict()
  config.published = config_dict.ConfigDict()
  config.lock()
  config.cases.unlock()
  config.published.unlock()
  return config


def _model() -> config_dict.ConfigDict:
  model = config_dict.ConfigDict()
  model.name = "qwen2.5-7b"  # of simulator/models.py
  model.number_bytes = 2.0  # of a weight or KV number in generators
  return model


def _cluster() -> config_dict.ConfigDict:
  cluster = config_dict.ConfigDict()
  cluster.accelerator = "H100"  # of simulator/hardware.py
  cluster.devices = 16
  cluster.trainer_devices = 8  # the others generate; colocated: all do both
  cluster.colocated = False  # generators stand still while the trainer works
  return cluster


def _generator() -> config_dict.ConfigDict:
  generator = config_dict.ConfigDict()
  generator.devices = 1  # of each generator
  generator.slots = 256  # requests decoded at once
  generator.chunk_steps = 16  # decode steps between two looks by the host
  generator.memory_share = 0.85  # of the devices' memory, for weights and KV
  generator.kv_tokens = 0  # whose KV a generator holds; 0 = what memory allows
  generator.progress_s = 10.0  # without a finish, until a report is due
  return generator


def _cost() -> config_dict.ConfigDict:
  cost = config_dict.ConfigDict()
  cost.file = ""  # measured, as --calibrate writes them; "" = the roofline
  # Shares of the data sheet's rates.
  cost.bandwidth = 0.6  # memory, in decoding
  cost.flops = 0.5  # in decoding and prefill
  cost.training = 0.35  # operations, in training
  cost.link = 0.5  # between devices
  cost.imbalance = 1.0  # experts: the busiest device's load over the mean
  cost.logprob_passes = 1.0  # of the trainer over a batch, beside training
  # Seconds on top.
  cost.step_fixed_s = 0.005  # of a decode step
  cost.train_fixed_s = 0.0  # of a training step
  cost.switch_fixed_s = 0.0  # colocated: of a change of roles
  cost.move_fixed_s = 0.05  # of a move
  cost.message_s = 0.0  # until an order follows what a part has done
  return cost


def _workload() -> config_dict.ConfigDict:
  workload = config_dict.ConfigDict()
  workload.lengths_file = ""  # of lengths, .json or text; "" = lognormal
  workload.mean_length = 2000.0  # tokens sampled, after the cut at max_length
  workload.sigma = 1.0  # deviation of the logarithm, before the cut
  workload.max_length = 16_384
  workload.growth = 0.0  # of lengths with each version; 0.01 = 1 % longer
  workload.prompt_tokens = 200
  workload.turns = 1  # above 1: an environment answers after each but the last
  workload.pause_s = 0.0  # mean time of an answer
  workload.pause_sigma = 1.0  # deviation of its logarithm
  workload.observation_tokens = 0  # of an answer
  workload.reward_s = 0.0  # mean time until a reward is known
  workload.reward_sigma = 0.0  # deviation of its logarithm
  return workload


def _coordinator() -> config_dict.ConfigDict:
  """As in configs/common.py, whose comments explain them."""
  coordinator = config_dict.ConfigDict()
  coordinator.schedule = "dora"
  coordinator.max_staleness = 1
  coordinator.prompts_per_batch = 64
  coordinator.group_size = 8
  coordinator.rollout_groups = "auto"
  coordinator.num_steps = 20
  coordinator.oversample = 1.25
  coordinator.evict = False
  coordinator.repartition = True
  coordinator.moves = True
  coordinator.filling = True
  coordinator.balance_on_step = True
  coordinator.balance_period_s = 10.0
  coordinator.kv_pressure = 0.9
  return coordinator


def _measure() -> config_dict.ConfigDict:
  measure = config_dict.ConfigDict()
  measure.warmup_steps = 4  # left out at the beginning
  measure.cooldown_steps = 4  # and at the end, at least K + 1
  measure.error_of = "step_s"  # what "error" in summary.json is about
  measure.where = ""  # names errors in summary.json; "" = the number of devices
  return measure
