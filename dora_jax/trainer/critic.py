"""A critic: a model of its own that foresees rewards, and its learning.

Its trunk has the policy's shape and starts at the policy's params; a linear
head on top starts at 0. Before each step it values every sampled token, from
which returns.py makes advantages and what it is to learn; then it learns.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dora_jax import interfaces, types
from dora_jax.model import layer_list, transformer
from dora_jax.trainer import (
  advantages,
  aggregation,
  device_batch,
  gradients,
  optimization,
  optimizers,
  returns,
  segments,
)
from dora_jax.trainer import trained as trained_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How a critic judges and learns.

  Attributes:
    kind: "gae" or "vtrace"; see returns.py.
    discount: of a reward for each token that it is later.
    trace_decay: see returns.gae; "vtrace" does not read it.
    weight_cap: see returns.vtrace; "gae" does not read it.
    value_clip: see returns.value_loss. It binds from a step's second update on.
    num_updates: of the critic in each step of the policy, each over all of the
      step's tokens.
    optimizer: of its own.
  """

  kind: Literal["gae", "vtrace"]
  discount: float
  trace_decay: float
  weight_cap: float
  value_clip: float
  num_updates: int
  optimizer: optimizers.OptimizerSettings


class Judged(NamedTuple):
  """What the critic makes of a micro-batch; on the host, 0 where not sampled.

  Attributes:
    values_BT: before each token, in the units of the rewards.
    advantages_BT: likewise.
    targets_BT: what the critic is to learn, likewise.
    to_go_BT: discounted reward from the token on, likewise.
  """

  values_BT: Float[Any, "B T"]
  advantages_BT: Float[Any, "B T"]
  targets_BT: Float[Any, "B T"]
  to_go_BT: Float[Any, "B T"]


class Critic:
  """Values, advantages, and a critic's own train state.

  Attributes:
    optimization: of its params.
  """

  def __init__(
    self,
    *,
    settings: Settings,
    loss_settings: gradients.LossSettings,
    mesh: jax.sharding.Mesh,
    rows: jax.sharding.Sharding,
    params: interfaces.Params,
  ):
    """Starts from a policy.

    Args:
      settings: of the critic.
      loss_settings: of the policy; model, dtype and remat are the critic's too.
      mesh: of the trainer.
      rows: how packed rows are laid out on it.
      params: of the policy, float32; they are copied.
    """
    trained = trained_lib.Critic(loss_settings.config)
    self._settings = settings
    self._rows = rows
    self._judge = _make_judge(settings, loss_settings)
    self._score = gradients.make_score(loss_settings, loss_settings.temperature)
    self.optimization = optimization.Optimization(
      trained=trained,
      loss=_make_loss(settings.value_clip),
      loss_settings=loss_settings,
      optimizer=settings.optimizer,
      mesh=mesh,
      params=trained.start(params),
      frozen=None,
    )

  def step(
    self, batches: Sequence[types.PackedBatch], policy: interfaces.Params
  ) -> tuple[list[types.PackedBatch], dict[str, float]]:
    """Judges a step's tokens, then learns from them.

    Args:
      batches: whose advantages are the rewards of the trajectories.
      policy: params of the policy being trained.

    Returns:
      The batches with the advantage of each token in place of the reward. Over
      the sampled tokens of the step, their mean is 0 and their deviation 1.
    """
    params = self.optimization.params()
    judged = []
    for batch in batches:
      arrays = device_batch.put(batch, self._rows)
      log_ratios_BT = self._log_ratios(policy, arrays)
      judged.append(self._judge(params, arrays, log_ratios_BT))
    judged = jax.device_get(judged)
    metrics = _judged_metrics(batches, judged)
    metrics |= self._learn(batches, judged)
    return _with_advantages(batches, judged), metrics

  def _log_ratios(
    self, policy: interfaces.Params, arrays: device_batch.DeviceBatch
  ) -> Float[jax.Array, "B T"]:
    """Of the policy and the behavior policy, where they are needed."""
    recorded_BT = arrays["behavior_logprobs"]
    if self._settings.kind == "gae":
      return jnp.zeros_like(recorded_BT)
    logprobs_BT, _ = self._score(policy, arrays)
    return jnp.where(arrays["loss_mask"] > 0.0, logprobs_BT - recorded_BT, 0.0)

  def _learn(
    self, batches: Sequence[types.PackedBatch], judged: Sequence[Judged]
  ) -> dict[str, float]:
    """Makes the step's updates; reports the loss before the first."""
    denominator = aggregation.denominator(
      "token_mean", batches, constant_length=0
    )
    made = [
      self.optimization.step(self._put(batches, judged), denominator)
      for _ in range(self._settings.num_updates)
    ]
    (loss, _, update), *_ = made
    return {
      "value_loss": loss,
      "critic_grad_norm": float(update.grad_norm),
      "critic_lr": float(update.lr),
      "critic_nonfinite_updates": float(self.optimization.num_nonfinite),
    }

  def _put(
    self, batches: Sequence[types.PackedBatch], judged: Sequence[Judged]
  ) -> Iterator[dict[str, jax.Array]]:
    """The micro-batches on the devices, with what the critic is to learn."""
    for batch, each in zip(batches, judged, strict=True):
      learnt = {"values": each.values_BT, "targets": each.targets_BT}
      arrays = device_batch.put(batch, self._rows)
      yield arrays | jax.device_put(learnt, self._rows)


def values(
  params: interfaces.Params,
  batch: device_batch.DeviceBatch,
  settings: gradients.LossSettings,
) -> Float[jax.Array, "B T"]:
  """The critic's values before each sampled token, in float32; 0 elsewhere."""
  trunk = params["trunk"]
  hidden_BTD, _ = transformer.forward(
    layer_list.apart(trunk) if settings.unrolls else trunk,
    trained_lib.trunk_config(settings.config),
    batch["tokens"],
    batch["positions"],
    attend=settings.attention.attend(batch["segment_ids"]),
    remat=settings.remat,
    hidden_sharding=settings.hidden_sharding,
    dtype=settings.compute_dtype,
  )
  values_BT = jnp.einsum(
    "BTD,D->BT",
    hidden_BTD,
    params["value"].astype(settings.compute_dtype),
    preferred_element_type=jnp.float32,
  )
  # The hidden state at t - 1 is what is known before the token at t. A sampled
  # token has one before it in its segment.
  values_BT = jnp.roll(values_BT, 1, axis=1)
  return jnp.where(batch["loss_mask"] > 0.0, values_BT, 0.0)


@functools.lru_cache
def _make_judge(
  settings: Settings, loss_settings: gradients.LossSettings
) -> Callable:
  """Jits (params, batch, log_ratios_BT) -> Judged."""

  def judge(params, batch, log_ratios_BT):
    values_BT = values(params, batch, loss_settings)
    values_BT, log_ratios_BT, batch = device_batch.gather_rows(
      (values_BT, log_ratios_BT, batch), loss_settings.hidden_sharding
    )
    mask_BT, ids_BT = batch["loss_mask"], batch["segment_ids"]
    # The reward comes with the last sampled token.
    num_later_BT = segments.later_sums(mask_BT, ids_BT)
    is_last_BT = (mask_BT > 0.0) & (num_later_BT == 0.0)
    rewards_BT = jnp.where(is_last_BT, batch["advantages"], 0.0)
    discount = settings.discount
    if settings.kind == "gae":
      found = returns.gae(
        rewards_BT,
        values_BT,
        mask_BT,
        ids_BT,
        discount=discount,
        trace_decay=settings.trace_decay,
      )
    else:
      found = returns.vtrace(
        log_ratios_BT,
        rewards_BT,
        values_BT,
        mask_BT,
        ids_BT,
        discount=discount,
        weight_cap=settings.weight_cap,
      )
    to_go = returns.gae(
      rewards_BT,
      jnp.zeros_like(values_BT),
      mask_BT,
      ids_BT,
      discount=discount,
      trace_decay=1.0,
    )
    return Judged(
      values_BT=values_BT,
      advantages_BT=found.advantages_BT,
      targets_BT=found.targets_BT,
      to_go_BT=to_go.targets_BT,
    )

  return jax.jit(judge)


@functools.lru_cache
def _make_loss(value_clip: float) -> gradients.Loss:
  """The loss of a micro-batch that has "values" and "targets" besides."""

  def loss(params, batch, denominator, *, settings):
    loss_BT = returns.value_loss(
      values(params, batch, settings),
      batch["values"],
      batch["targets"],
      value_clip=value_clip,
    )
    mask_BT = batch["loss_mask"]
    total = aggregation.weighted_sum(loss_BT, jnp.ones_like(loss_BT), mask_BT)
    return total / denominator, None

  return loss


def _with_advantages(
  batches: Sequence[types.PackedBatch], judged: Sequence[Judged]
) -> list[types.PackedBatch]:
  """Normalizes over the sampled tokens of the step, and puts them in place."""
  masks = [batch.loss_mask > 0.0 for batch in batches]
  found = _sampled(masks, [each.advantages_BT for each in judged])
  mean, deviation = found.mean(), found.std()
  return [
    dataclasses.replace(
      batch,
      advantages=np.where(
        mask_BT,
        (each.advantages_BT - mean) / (deviation + advantages.EPS),
        0.0,
      ).astype(np.float32),
    )
    for batch, mask_BT, each in zip(batches, masks, judged, strict=True)
  ]


def _judged_metrics(
  batches: Sequence[types.PackedBatch], judged: Sequence[Judged]
) -> dict[str, float]:
  """How well the critic foresaw the rewards of the step.

  explained_variance is 1 - var(G - V) / var(G) over sampled tokens, G the
  discounted reward from the token on: 1 where values are exact, 0 where they
  are no better than a constant. It is absent where all G are equal.
  """
  masks = [batch.loss_mask > 0.0 for batch in batches]
  found = _sampled(masks, [each.values_BT for each in judged])
  to_go = _sampled(masks, [each.to_go_BT for each in judged])
  metrics = {"value_mean": float(found.mean())}
  if to_go.std() > 0.0:
    left = (to_go - found).var() / to_go.var()
    metrics["explained_variance"] = float(1.0 - left)
  return metrics


def _sampled(
  masks: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> np.ndarray:
  """Of all micro-batches, in one array of float64."""
  return np.concatenate(
    [value_BT[mask_BT] for mask_BT, value_BT in zip(masks, values, strict=True)]
  ).astype(np.float64)
