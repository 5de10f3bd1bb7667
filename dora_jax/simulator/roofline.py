"""Costs from data sheets: bytes over bandwidth, operations over their peak.

Every rate of the data sheet is multiplied by an efficiency, the one thing here
that has to be fitted. With b bytes a number, N weights (N' of them active), a
generator of g devices and a trainer of t:

  weights_read = b * N / (g * bandwidth * e_b)       decode reads all weights
  request_flops = 2 * N' / (g * peak * e_f)           and computes one token
  kv_read = b * KV / (g * bandwidth * e_b)
  prefill_token = request_flops                        compute-bound
  train_token = (6 + 2 * passes) * N' / (t * peak * e_t)
  publish = load = b * N / (g * link * e_l)            into one generator
  move_token = b * KV / (g * link * e_l)
  spill_token = b * KV / (g * host)
  switch = fixed + state bytes / (t * host)            16 bytes a weight

A training step computes 6 operations a weight and token (forward 2, backward 4;
Kaplan et al., arXiv 2001.08361, section 2.1), and each pass for log-probs 2.
Attention in training is left out: below 3 % of the rest at the paper's lengths.
Of a mixture of experts, the busiest device has `imbalance` times the mean load,
and everything of the experts waits for it.
"""

import dataclasses

from dora_jax.simulator import costs, hardware, models

_STATE_BYTES = 16  # of a weight: float32 master, two moments, and a gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiencies:
  """What of each data-sheet rate is reached, and what comes on top.

  Attributes:
    bandwidth: e_b, share of the memory bandwidth in decoding.
    flops: e_f, share of the peak in decoding and prefill.
    training: e_t, share of the peak in training; its idle times included.
    link: e_l, share of the links.
    imbalance: of experts, the busiest device's load over the mean; at least 1.
    step_fixed_s: of a decode step, on top.
    train_fixed_s: of a training step, on top.
    switch_fixed_s: of a change of roles, on top.
    move_fixed_s: of a move, on top.
    message_s: to the coordinator, or from it.
  """

  bandwidth: float
  flops: float
  training: float
  link: float
  imbalance: float
  step_fixed_s: float
  train_fixed_s: float
  switch_fixed_s: float
  move_fixed_s: float
  message_s: float

  def __post_init__(self) -> None:
    for name in ("bandwidth", "flops", "training", "link"):
      value = getattr(self, name)
      if not 0 < value <= 1:
        raise ValueError(
          f"config.cost.{name} is {value} but must be above 0 and at most 1, "
          "a share of the data sheet's rate."
        )
    if not self.imbalance >= 1:
      raise ValueError(
        f"config.cost.imbalance is {self.imbalance} but must be at least 1: "
        "the busiest device has no less than the mean load."
      )


def make_costs(
  *,
  size: models.ModelSize,
  accelerator: hardware.Accelerator,
  efficiencies: Efficiencies,
  generator_devices: int,
  trainer_devices: int,
  number_bytes: float,
  num_logprob_passes: float,
) -> costs.Costs:
  """Computes the costs of one generator and of the trainer.

  Args:
    size: of the model.
    accelerator: that everything runs on.
    efficiencies: of its rates.
    generator_devices: g, of each generator.
    trainer_devices: t.
    number_bytes: b, of a weight or KV number in generators and on links.
    num_logprob_passes: forward passes of the trainer beside the training step's
      own, such as for the reference.
  """
  e = efficiencies
  read_s = number_bytes / (
    generator_devices * accelerator.memory_bytes_per_s * e.bandwidth
  )
  flop_s = 1 / (generator_devices * accelerator.flops_per_s * e.flops)
  link_s = number_bytes / (
    generator_devices * accelerator.link_bytes_per_s * e.link
  )
  host_s = 1 / accelerator.host_bytes_per_s
  num_dense = size.num_params - size.num_expert_params
  # Experts are as slow as their busiest device.
  num_expert_active = size.num_expert_params * size.expert_share
  num_loaded = size.num_active + num_expert_active * (e.imbalance - 1)
  train_flops = (6 + 2 * num_logprob_passes) * num_loaded
  return costs.Costs(
    step_fixed_s=e.step_fixed_s,
    weights_read_s=num_dense * read_s,
    experts_read_s=size.num_expert_params * e.imbalance * read_s,
    expert_share=size.expert_share,
    kv_token_read_s=size.kv_values * read_s,
    request_flops_s=2 * num_loaded * flop_s,
    kv_token_flops_s=size.attention_flops * flop_s,
    prefill_token_s=2 * num_loaded * flop_s,
    train_token_s=train_flops
    / (trainer_devices * accelerator.flops_per_s * e.training),
    train_fixed_s=e.train_fixed_s,
    publish_s=size.num_params * link_s,
    load_s=size.num_params * link_s,
    move_fixed_s=e.move_fixed_s,
    kv_token_move_s=size.kv_values * link_s,
    kv_token_spill_s=size.kv_values * number_bytes * host_s / generator_devices,
    switch_s=e.switch_fixed_s
    + size.num_params * _STATE_BYTES * host_s / trainer_devices,
    message_s=e.message_s,
  )


def kv_capacity(
  *,
  size: models.ModelSize,
  accelerator: hardware.Accelerator,
  generator_devices: int,
  number_bytes: float,
  memory_share: float,
) -> int:
  """Tokens whose KV a generator holds beside its weights.

  Raises:
    ValueError: the weights alone do not fit.
  """
  usable = generator_devices * accelerator.memory_bytes * memory_share
  left = usable - size.num_params * number_bytes
  if left <= 0:
    raise ValueError(
      f"The weights take {size.num_params * number_bytes / 1e9:.0f} GB, but a "
      f"generator has {usable / 1e9:.0f} GB for weights and KV: raise "
      "config.generator.devices or config.generator.memory_share."
    )
  return int(left / (size.kv_values * number_bytes))
