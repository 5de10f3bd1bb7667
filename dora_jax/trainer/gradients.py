"""The device side of a train step: losses of packed rows, one update.

The loss is a weighted sum over sampled tokens divided by one denominator for
the whole step (aggregation.py). Hence its gradient is the sum of the gradients
of the micro-batches, however the rows are split over micro-batches or devices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float

from dora_jax import interfaces
from dora_jax.model import adapted, layer_list, transformer
from dora_jax.trainer import (
  aggregation,
  device_batch,
  logprobs,
  losses,
  objective,
  optimizers,
  train_state,
)
from dora_jax.trainer import trained as trained_lib
from dora_jax.trainer.attention import base


class TokenStats(NamedTuple):
  """What the loss saw of each token of a micro-batch; meant for the host.

  Attributes:
    entropies_BT: of the distribution that drew the token, in nats.
    seen: what the objective saw; None for supervised pairs.
    gaps_BT: log of recomputed / behavior in nats, what engine and trainer
      disagree about; None where nothing is recomputed.
  """

  entropies_BT: Float[Any, "B T"]
  seen: objective.Seen | None
  gaps_BT: Float[Any, "B T"] | None


class UpdateStats(NamedTuple):
  """What one update did; meant for the host.

  Attributes:
    grad_norm: global norm of the gradient, before the clip.
    is_applied: whether it was finite; otherwise nothing changed.
    lr: learning rate of this update.
  """

  grad_norm: Any
  is_applied: Any
  lr: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
  """What the losses need beside params and batch.

  Attributes:
    config: of the model.
    objective: of the policy.
    temperature: at which the generator samples.
    attention: within the segments of a row.
    compute_dtype: of the forward and backward pass; the loss is in float32.
    logprob_chunk: see logprobs.token_logprobs.
    remat: see logprobs.token_logprobs.
    unrolls: whether layers are compiled one by one; see `layer_list`.
    hidden_sharding: see logprobs.token_logprobs.
  """

  config: transformer.ModelConfig
  objective: objective.Objective
  temperature: float
  attention: base.SegmentAttention
  compute_dtype: Any
  logprob_chunk: int
  remat: bool
  unrolls: bool
  hidden_sharding: jax.sharding.Sharding | None


# What it tells besides the loss is its own; of tokens, TokenStats.
Loss = Callable[..., tuple[Float[jax.Array, ""], Any]]


def score(
  params: interfaces.Params,
  batch: device_batch.DeviceBatch,
  settings: LossSettings,
  *,
  temperature: float,
  learns_entropy: bool,
) -> tuple[Float[jax.Array, "B T"], Float[jax.Array, "B T"]]:
  """Log-probabilities and entropies of a micro-batch's tokens."""
  if settings.unrolls:
    params = layer_list.apart(params)
  return logprobs.token_logprobs(
    params,
    settings.config,
    batch["tokens"],
    batch["positions"],
    batch["segment_ids"],
    attend=settings.attention.attend,
    dtype=settings.compute_dtype,
    temperature=temperature,
    learns_entropy=learns_entropy,
    remat=settings.remat,
    chunk_size=settings.logprob_chunk,
    hidden_sharding=settings.hidden_sharding,
  )


def policy_loss(
  params: interfaces.Params,
  batch: device_batch.DeviceBatch,
  denominator: jax.typing.ArrayLike,
  *,
  settings: LossSettings,
) -> tuple[Float[jax.Array, ""], TokenStats]:
  """This micro-batch's part of the loss of the step."""
  logprobs_BT, entropies_BT = score(
    params,
    batch,
    settings,
    temperature=settings.temperature,
    learns_entropy=settings.objective.entropy_coefficient > 0.0,
  )
  logprobs_BT, entropies_BT, batch = device_batch.gather_rows(
    (logprobs_BT, entropies_BT, batch), settings.hidden_sharding
  )
  sampled = _sampled(batch)
  total, seen = objective.weighted_sum(
    logprobs_BT, entropies_BT, sampled, settings.objective
  )
  gaps_BT = None
  if sampled.recomputed_logprobs_BT is not None:
    gaps_BT = sampled.recomputed_logprobs_BT - sampled.behavior_logprobs_BT
  stats = TokenStats(
    entropies_BT=jax.lax.stop_gradient(entropies_BT), seen=seen, gaps_BT=gaps_BT
  )
  return total / denominator, stats


def _sampled(batch: device_batch.DeviceBatch) -> objective.Sampled:
  """The batch's constants, 0 where the policy sampled nothing."""
  is_sampled_BT = batch["loss_mask"] > 0.0
  cut = {
    name: jnp.where(is_sampled_BT, values_BT, 0.0)
    for name, values_BT in batch.items()
    if name.endswith("logprobs") or name == "advantages"
  }
  return objective.Sampled(
    behavior_logprobs_BT=cut["behavior_logprobs"],
    advantages_BT=cut["advantages"],
    loss_mask_BT=batch["loss_mask"],
    segment_ids_BT=batch["segment_ids"],
    lags_BT=batch["lags"],
    recomputed_logprobs_BT=cut.get("recomputed_logprobs"),
    ref_logprobs_BT=cut.get("ref_logprobs"),
  )


def supervised_loss(
  params: interfaces.Params,
  batch: device_batch.DeviceBatch,
  denominator: jax.typing.ArrayLike,
  *,
  settings: LossSettings,
) -> tuple[Float[jax.Array, ""], TokenStats]:
  """This micro-batch's part of the mean negative log-likelihood per token.

  It is taken at temperature 1, the distribution that pairs are drawn from.
  """
  mask_BT = batch["loss_mask"]
  logprobs_BT, entropies_BT = score(
    params, batch, settings, temperature=1.0, learns_entropy=False
  )
  loss_BT = losses.supervised(logprobs_BT)
  total = aggregation.weighted_sum(loss_BT, jnp.ones_like(loss_BT), mask_BT)
  stats = TokenStats(entropies_BT=entropies_BT, seen=None, gaps_BT=None)
  return total / denominator, stats


@functools.lru_cache
def make_score(settings: LossSettings, temperature: float) -> Callable:
  """Jits (params, batch) -> `score` at this temperature."""
  return jax.jit(
    functools.partial(
      score, settings=settings, temperature=temperature, learns_entropy=False
    )
  )


@functools.lru_cache
def make_copy(
  config: transformer.ModelConfig, mesh: jax.sharding.Mesh, dtype: Any
) -> Callable:
  """Jits params -> a copy in another dtype, to be kept beside them."""
  _, shardings = train_state.param_layout(trained_lib.Policy(config), mesh)

  def copy(params):
    # Without jnp.copy, an array that is of the dtype already would be passed
    # through, and be lost when its owner donates it.
    return jax.tree.map(lambda x: jnp.copy(x).astype(dtype), params)

  return jax.jit(copy, out_shardings=shardings)


@functools.lru_cache
def make_whole(
  trained: trained_lib.Trained, mesh: jax.sharding.Mesh
) -> Callable[[interfaces.Params, interfaces.Params | None], interfaces.Params]:
  """(params, frozen) -> the params of the model in float32, without adapters.

  Where nothing is frozen they are those that are given.
  """
  if trained.base is None:
    return lambda params, frozen: params
  _, shardings = train_state.param_layout(trained.base, mesh)

  def merge(params, frozen):
    frozen = jax.tree.map(lambda x: x.astype(jnp.float32), frozen)
    return adapted.merge_layers(trained.whole(params, frozen))

  return jax.jit(merge, out_shardings=shardings)


@functools.lru_cache
def make_update(
  trained: trained_lib.Trained,
  mesh: jax.sharding.Mesh,
  settings: optimizers.OptimizerSettings,
) -> Callable:
  """Jits (state, gradients) -> (state, UpdateStats); the state is donated.

  A gradient that is not finite leaves the whole state as it was.
  """
  optimizer = optimizers.make_optimizer(settings, trained)
  schedule = optimizers.make_schedule(settings)

  def update(state, gradients):
    grad_norm = optax.tree.norm(gradients)
    is_finite = jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(
      gradients, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if average is not None:
      average = optax.incremental_update(
        params, average, 1.0 - settings.average_decay
      )
    new = train_state.TrainState(
      params=params,
      opt_state=opt_state,
      step=state.step + 1,
      average=average,
    )
    kept = jax.tree.map(lambda x, y: jnp.where(is_finite, x, y), new, state)
    stats = UpdateStats(
      grad_norm=grad_norm,
      is_applied=is_finite,
      lr=jnp.asarray(schedule(state.step), jnp.float32),
    )
    return kept, stats

  shardings = train_state.state_shardings(trained, mesh, settings)
  return jax.jit(
    update, donate_argnums=0, out_shardings=(shardings, shardings.step)
  )
