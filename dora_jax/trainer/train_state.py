"""What the trainer keeps on its devices between steps, and its optimizer.

Functions that jit are cached by their arguments: a second trainer of the same
settings (on resume, in tests) compiles nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from dora_jax import interfaces
from dora_jax.model import transformer
from dora_jax.parallel import axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """One pytree: donated to each update, saved in each checkpoint.

  Attributes:
    params: float32 masters.
    opt_state: of optax; its moments are sharded as the params are.
    step: int32 scalar, the number of optimizer updates behind the params.
  """

  params: interfaces.Params
  opt_state: Any
  step: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
  """AdamW after a clip of the global gradient norm.

  Attributes:
    lr: learning rate after the warm-up.
    warmup_steps: updates over which the learning rate rises linearly.
    total_steps: updates after which a cosine schedule has reached 0.
    schedule: of the learning rate after the warm-up.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled, times the learning rate; applies to every param.
    clip_norm: largest global gradient norm; inf never clips.
  """

  lr: float
  warmup_steps: int
  total_steps: int
  schedule: Literal["constant", "cosine"]
  b1: float
  b2: float
  eps: float
  weight_decay: float
  clip_norm: float


def make_schedule(settings: OptimizerSettings) -> optax.Schedule:
  """Learning rate as a function of the number of updates before this one.

  It is lr * (n + 1) / (warmup_steps + 1) while n < warmup_steps, so that the
  first update already moves the params.
  """
  match settings.schedule:
    case "constant":
      after = optax.constant_schedule(settings.lr)
    case "cosine":
      decay_steps = settings.total_steps - settings.warmup_steps
      if decay_steps < 1:
        raise ValueError(
          f"A cosine schedule of {settings.total_steps} steps has no room for "
          f"{settings.warmup_steps} steps of warm-up: lower "
          "config.trainer.warmup_steps."
        )
      after = optax.cosine_decay_schedule(settings.lr, decay_steps)
    case unknown:
      raise ValueError(
        f"Unknown schedule {unknown!r}, need 'constant' or 'cosine': change "
        "config.trainer.schedule."
      )
  if settings.warmup_steps == 0:
    return after
  start_lr = settings.lr / (settings.warmup_steps + 1)
  warmup = optax.linear_schedule(start_lr, settings.lr, settings.warmup_steps)
  return optax.join_schedules([warmup, after], [settings.warmup_steps])


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
  """AdamW with global-norm clipping.

  Source: https://arxiv.org/abs/1711.05101, algorithm 2.
  """
  if settings.clip_norm <= 0.0:
    raise ValueError(
      f"clip_norm is {settings.clip_norm}, need more than 0 (inf never clips): "
      "change config.trainer.clip_norm."
    )
  chain = optax.chain(
    optax.clip_by_global_norm(settings.clip_norm),
    optax.adamw(
      make_schedule(settings),
      b1=settings.b1,
      b2=settings.b2,
      eps=settings.eps,
      weight_decay=settings.weight_decay,
    ),
  )

  def update(updates, state, params=None):
    # optax raises b1 to an integer count, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
      return chain.update(updates, state, params)

  return optax.GradientTransformation(chain.init, update)


@functools.lru_cache
def param_layout(
  config: transformer.ModelConfig, mesh: jax.sharding.Mesh
) -> tuple[interfaces.Params, interfaces.Params]:
  """Shapes of the float32 params, and their shardings for training."""
  shapes = transformer.abstract_params(config, dtype=jnp.float32)
  names = transformer.logical_axes(config)
  axes.check_divisible(shapes, names, mesh, axes.TRAIN)
  return shapes, axes.shardings(names, mesh, axes.TRAIN)


@functools.lru_cache
def state_shardings(
  config: transformer.ModelConfig,
  mesh: jax.sharding.Mesh,
  settings: OptimizerSettings,
) -> TrainState:
  """Shards the optimizer's moments as the params, and replicates the rest."""
  optimizer = make_optimizer(settings)
  shapes, shardings = param_layout(config, mesh)
  replicated = jax.NamedSharding(mesh, jax.P())
  opt_shardings = optax.tree_map_params(
    optimizer,
    lambda _, sharding: sharding,
    jax.eval_shape(optimizer.init, shapes),
    shardings,
    transform_non_params=lambda _: replicated,
  )
  return TrainState(params=shardings, opt_state=opt_shardings, step=replicated)


@functools.lru_cache
def make_create(
  config: transformer.ModelConfig,
  mesh: jax.sharding.Mesh,
  settings: OptimizerSettings,
) -> Callable[[interfaces.Params], TrainState]:
  """Jits params -> a fresh state with a copy of them."""
  optimizer = make_optimizer(settings)

  def create(params: interfaces.Params) -> TrainState:
    # The copy keeps jit from handing the caller's buffers on, which the first
    # update would then donate.
    params = jax.tree.map(lambda x: jnp.copy(x).astype(jnp.float32), params)
    return TrainState(
      params=params,
      opt_state=optimizer.init(params),
      step=jnp.zeros((), jnp.int32),
    )

  return jax.jit(create, out_shardings=state_shardings(config, mesh, settings))
