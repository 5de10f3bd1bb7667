"""What everything costs, in seconds, as a few linear formulas.

A decode step of n live requests that hold c tokens of KV takes

  step_s(n, c) = fixed + max(read(n) + kv_read * c, n * flops + c * kv_flops)

with read(n) = weights + experts * (1 - (1 - share)^n): the weights are read
once a step, and of a mixture of experts those that a live request is routed to.
Where these numbers come from is not known here: `roofline` computes them from
data sheets, `calibrate` measures them from a run.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Seconds of each thing that a cluster does.

  Attributes:
    step_fixed_s: of a decode step, whatever is live: launches, host, exchange
      between the devices of a generator.
    weights_read_s: to read the weights that every token uses.
    experts_read_s: to read all routed experts of the busiest device.
    expert_share: of a layer's routed experts, those that one token uses.
    kv_token_read_s: to read the KV of one token.
    request_flops_s: to compute one token of one request.
    kv_token_flops_s: to attend to one token of KV.
    prefill_token_s: of one token of a prompt, or one that is prefilled again.
    train_token_s: of one token of a batch, logprob passes included.
    train_fixed_s: of a training step, whatever its batch.
    publish_s: from a finished step to where its weights can be had; the trainer
      waits for it.
    load_s: until a generator serves a version that is published.
    move_fixed_s: of a move, whatever it carries.
    kv_token_move_s: to carry the KV of one token to another generator.
    kv_token_spill_s: to carry the KV of one token to the host, or back.
    switch_s: where trainer and generators share devices, to change from one to
      the other.
    message_s: from what a generator, the trainer or a reward has done to the
      orders that follow from it.
  """

  step_fixed_s: float
  weights_read_s: float
  experts_read_s: float = 0.0
  expert_share: float = 0.0
  kv_token_read_s: float
  request_flops_s: float
  kv_token_flops_s: float
  prefill_token_s: float
  train_token_s: float
  train_fixed_s: float
  publish_s: float
  load_s: float
  move_fixed_s: float
  kv_token_move_s: float
  kv_token_spill_s: float
  switch_s: float
  message_s: float

  def __post_init__(self) -> None:
    for name, value in dataclasses.asdict(self).items():
      if not (value >= 0 and math.isfinite(value)):
        raise ValueError(
          f"{name} is {value} but must be finite and at least 0: look at "
          "config.cost."
        )
    if not self.step_fixed_s + self.weights_read_s > 0:
      raise ValueError(
        "A decode step would take no time: config.cost.step_fixed_s or the "
        "weights that it reads must be above 0."
      )

  def decode_s(self, num_live: int, context: float, num_steps: float) -> float:
    """Integrates the seconds of decode steps in which the same ones live.

    Args:
      num_live: n; each adds one token to the context in each step.
      context: c, tokens whose KV they hold at the first step.
      num_steps: a whole number or not.
    """
    seconds, left = 0.0, num_steps
    for start_s, slope_s, length in self._pieces(num_live, context):
      part = min(left, length)
      seconds += start_s * part + 0.5 * slope_s * part * part
      left -= part
      if left <= 0:
        break
    return seconds

  def decode_steps(
    self, num_live: int, context: float, seconds: float
  ) -> float:
    """How many decode steps fit into the seconds: the inverse of `decode_s`."""
    num_steps, left_s = 0.0, seconds
    for start_s, slope_s, length in self._pieces(num_live, context):
      whole_s = math.inf
      if length < math.inf:
        whole_s = start_s * length + 0.5 * slope_s * length * length
      if left_s > whole_s:
        num_steps, left_s = num_steps + length, left_s - whole_s
        continue
      # start * x + slope / 2 * x^2 = left, in the form that needs no slope.
      root_s = math.sqrt(start_s * start_s + 2.0 * slope_s * left_s)
      return num_steps + 2.0 * left_s / (start_s + root_s)
    return num_steps

  def _pieces(
    self, num_live: int, context: float
  ) -> tuple[tuple[float, float, float], ...]:
    """(seconds of its first step, growth a step, steps) of each linear piece.

    Both sides of the maximum grow linearly, so they cross once at most.
    """
    read_s = self.weights_read_s
    if self.experts_read_s:
      unread = (1.0 - self.expert_share) ** num_live
      read_s += self.experts_read_s * (1.0 - unread)
    read_s += self.kv_token_read_s * context
    flops_s = num_live * self.request_flops_s + context * self.kv_token_flops_s
    read_slope_s = num_live * self.kv_token_read_s
    flops_slope_s = num_live * self.kv_token_flops_s
    fixed_s = self.step_fixed_s
    if read_s >= flops_s:
      first, second = (read_s, read_slope_s), (flops_s, flops_slope_s)
    else:
      first, second = (flops_s, flops_slope_s), (read_s, read_slope_s)
    if first[1] >= second[1]:
      return ((fixed_s + first[0], first[1], math.inf),)
    crossing = (first[0] - second[0]) / (second[1] - first[1])
    return (
      (fixed_s + first[0], first[1], crossing),
      (fixed_s + first[0] + first[1] * crossing, second[1], math.inf),
    )

  def train_s(self, num_tokens: int) -> float:
    """Of a training step with so many tokens, until it is published."""
    return self.train_fixed_s + self.train_token_s * num_tokens + self.publish_s

  def move_s(self, num_kv_tokens: int) -> float:
    """Of a move that carries so many tokens' KV."""
    return self.move_fixed_s + self.kv_token_move_s * num_kv_tokens
