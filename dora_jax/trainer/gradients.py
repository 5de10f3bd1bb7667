"""The device side of a train step: gradients of packed rows, one update.

The loss is a sum over sampled tokens divided by one denominator, the number of
sampled tokens in the whole step. Hence its gradient is the sum of the gradients
of the micro-batches, however the rows are split over micro-batches or devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float

from dora_jax import interfaces, types
from dora_jax.model import transformer
from dora_jax.trainer import logprobs, losses, train_state

# Fields of a PackedBatch that the loss reads; the rest stays on the host.
_FIELDS = (
  "tokens",
  "positions",
  "segment_ids",
  "loss_mask",
  "advantages",
  "behavior_logprobs",
)

DeviceBatch = Mapping[str, jax.Array]
PolicyLoss = Literal["ppo_clip", "decoupled_ppo"]


class TokenStats(NamedTuple):
  """What the loss saw of each token of a micro-batch; meant for the host.

  Attributes:
    log_ratios_BT: log of pi / pi_behavior in nats, see losses.ClipStats; for
      supervised pairs the log-probability itself.
    entropies_BT: of the distribution that drew the token, in nats.
    is_clipped_low_BT: see losses.ClipStats.
    is_clipped_high_BT: see losses.ClipStats.
    is_capped_BT: see losses.ClipStats.
  """

  log_ratios_BT: Float[Any, "B T"]
  entropies_BT: Float[Any, "B T"]
  is_clipped_low_BT: Bool[Any, "B T"]
  is_clipped_high_BT: Bool[Any, "B T"]
  is_capped_BT: Bool[Any, "B T"]


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
    loss: which of `losses` the policy is trained by.
    clip_low: see losses.ppo_clip.
    clip_high: see losses.ppo_clip.
    weight_cap: see losses.decoupled_ppo; ppo_clip does not read it.
    temperature: at which the generator samples.
    compute_dtype: of the forward and backward pass; the loss is in float32.
    logprob_chunk: see logprobs.token_logprobs.
    remat: see logprobs.token_logprobs.
    hidden_sharding: see logprobs.token_logprobs.
  """

  config: transformer.ModelConfig
  loss: PolicyLoss
  clip_low: float
  clip_high: float
  weight_cap: float
  temperature: float
  compute_dtype: Any
  logprob_chunk: int
  remat: bool
  hidden_sharding: jax.sharding.Sharding | None


Loss = Callable[..., tuple[Float[jax.Array, ""], TokenStats]]


def put_batch(
  batch: types.PackedBatch, sharding: jax.sharding.Sharding
) -> DeviceBatch:
  """Places what the loss reads of a micro-batch on the devices."""
  arrays = {field: getattr(batch, field) for field in _FIELDS}
  return jax.device_put(arrays, sharding)


def score(
  params: interfaces.Params,
  batch: DeviceBatch,
  settings: LossSettings,
  *,
  temperature: float,
) -> tuple[Float[jax.Array, "B T"], Float[jax.Array, "B T"]]:
  """Log-probabilities and entropies of a micro-batch's tokens."""
  params = jax.tree.map(lambda x: x.astype(settings.compute_dtype), params)
  return logprobs.token_logprobs(
    params,
    settings.config,
    batch["tokens"],
    batch["positions"],
    batch["segment_ids"],
    temperature=temperature,
    remat=settings.remat,
    chunk_size=settings.logprob_chunk,
    hidden_sharding=settings.hidden_sharding,
  )


def policy_loss(
  params: interfaces.Params,
  batch: DeviceBatch,
  denominator: jax.typing.ArrayLike,
  *,
  settings: LossSettings,
) -> tuple[Float[jax.Array, ""], TokenStats]:
  """This micro-batch's part of the token-mean of the loss of the settings.

  Source: token-level mean as in DAPO, section 3.3
  (https://arxiv.org/abs/2503.14476).
  """
  mask_BT = batch["loss_mask"]
  logprobs_BT, entropies_BT = score(
    params, batch, settings, temperature=settings.temperature
  )
  # Cut before the loss, for a NaN in a masked token would reach the gradient
  # through a mask that comes after it.
  is_sampled_BT = mask_BT > 0.0
  loss_BT, clip = _token_losses(
    jnp.where(is_sampled_BT, logprobs_BT, 0.0),
    jnp.where(is_sampled_BT, batch["behavior_logprobs"], 0.0),
    jnp.where(is_sampled_BT, batch["advantages"], 0.0),
    settings,
  )
  stats = TokenStats(
    log_ratios_BT=clip.log_ratios_BT,
    entropies_BT=entropies_BT,
    is_clipped_low_BT=clip.is_clipped_low_BT,
    is_clipped_high_BT=clip.is_clipped_high_BT,
    is_capped_BT=clip.is_capped_BT,
  )
  return losses.sum_where(loss_BT, mask_BT) / denominator, stats


def _token_losses(
  logprobs_BT: Float[jax.Array, "B T"],
  behavior_logprobs_BT: Float[jax.Array, "B T"],
  advantages_BT: Float[jax.Array, "B T"],
  settings: LossSettings,
) -> tuple[Float[jax.Array, "B T"], losses.ClipStats]:
  """The loss that the settings name, of every token."""
  clip_low, clip_high = settings.clip_low, settings.clip_high
  if settings.loss == "ppo_clip":
    return losses.ppo_clip(
      logprobs_BT,
      behavior_logprobs_BT,
      advantages_BT,
      clip_low=clip_low,
      clip_high=clip_high,
    )
  return losses.decoupled_ppo(
    logprobs_BT,
    # A step is one update, taken where it starts: the proximal policy is the
    # one that this forward has just computed. So its ratio is 1, and the clip
    # would bind only if a step made several updates.
    jax.lax.stop_gradient(logprobs_BT),
    behavior_logprobs_BT,
    advantages_BT,
    clip_low=clip_low,
    clip_high=clip_high,
    weight_cap=settings.weight_cap,
  )


def supervised_loss(
  params: interfaces.Params,
  batch: DeviceBatch,
  denominator: jax.typing.ArrayLike,
  *,
  settings: LossSettings,
) -> tuple[Float[jax.Array, ""], TokenStats]:
  """This micro-batch's part of the mean negative log-likelihood per token.

  It is taken at temperature 1, the distribution that pairs are drawn from.
  """
  mask_BT = batch["loss_mask"]
  logprobs_BT, entropies_BT = score(params, batch, settings, temperature=1.0)
  stats = TokenStats(
    log_ratios_BT=jax.lax.stop_gradient(logprobs_BT),
    entropies_BT=entropies_BT,
    is_clipped_low_BT=jnp.zeros(mask_BT.shape, bool),
    is_clipped_high_BT=jnp.zeros(mask_BT.shape, bool),
    is_capped_BT=jnp.zeros(mask_BT.shape, bool),
  )
  loss_BT = losses.supervised(logprobs_BT)
  return losses.sum_where(loss_BT, mask_BT) / denominator, stats


@functools.lru_cache
def make_score(settings: LossSettings) -> Callable:
  """Jits (params, batch) -> `score` at temperature 1."""
  return jax.jit(functools.partial(score, settings=settings, temperature=1.0))


@functools.lru_cache
def make_accumulate(
  loss: Loss, settings: LossSettings, mesh: jax.sharding.Mesh
) -> Callable:
  """Jits (params, sum, batch, denominator) -> (sum, loss, TokenStats).

  The sum of gradients, float32 and sharded as the params, is donated.
  """

  def accumulate(params, gradients, batch, denominator):
    (value, stats), new = jax.value_and_grad(loss, has_aux=True)(
      params, batch, denominator, settings=settings
    )
    return jax.tree.map(jnp.add, gradients, new), value, stats

  _, shardings = train_state.param_layout(settings.config, mesh)
  # Stats are small; replicated, every host can read them whole.
  replicated = jax.NamedSharding(mesh, jax.P())
  return jax.jit(
    accumulate,
    donate_argnums=1,
    out_shardings=(shardings, replicated, replicated),
  )


@functools.lru_cache
def make_zeros(
  config: transformer.ModelConfig, mesh: jax.sharding.Mesh
) -> Callable:
  """Jits () -> a sum of no gradients."""
  shapes, shardings = train_state.param_layout(config, mesh)

  def zeros():
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  return jax.jit(zeros, out_shardings=shardings)


@functools.lru_cache
def make_update(
  config: transformer.ModelConfig,
  mesh: jax.sharding.Mesh,
  settings: train_state.OptimizerSettings,
) -> Callable:
  """Jits (state, gradients) -> (state, UpdateStats); the state is donated.

  A gradient that is not finite leaves params, moments and step as they were.
  """
  optimizer = train_state.make_optimizer(settings)
  schedule = train_state.make_schedule(settings)

  def update(state, gradients):
    grad_norm = optax.tree.norm(gradients)
    is_finite = jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(
      gradients, state.opt_state, state.params
    )
    new = train_state.TrainState(
      params=optax.apply_updates(state.params, updates),
      opt_state=opt_state,
      step=state.step + 1,
    )
    kept = jax.tree.map(lambda x, y: jnp.where(is_finite, x, y), new, state)
    stats = UpdateStats(
      grad_norm=grad_norm,
      is_applied=is_finite,
      lr=jnp.asarray(schedule(state.step), jnp.float32),
    )
    return kept, stats

  shardings = train_state.state_shardings(config, mesh, settings)
  return jax.jit(
    update, donate_argnums=0, out_shardings=(shardings, shardings.step)
  )
