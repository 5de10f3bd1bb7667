"""What the trainer keeps on its devices between steps.

Functions that jit are cached by their arguments: a second trainer of the same
settings (on resume, in tests) compiles nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dora_jax import interfaces
from dora_jax.parallel import axes
from dora_jax.trainer import optimizers
from dora_jax.trainer import trained as trained_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """One pytree: donated to each update, saved in each checkpoint.

  Attributes:
    params: float32 masters of what is trained.
    opt_state: of optax; its moments are sharded as the params are.
    step: int32 scalar, the number of optimizer updates behind the params.
    average: running average of the params in float32; None where none is kept.
    critic: the TrainState of the critic in a checkpoint; None where there is
      none, and in what an update is given.
    frozen: params that are not trained, in the compute dtype; likewise.
  """

  params: interfaces.Params
  opt_state: Any
  step: Any
  average: interfaces.Params | None
  critic: Any = None
  frozen: interfaces.Params | None = None


@functools.lru_cache
def param_layout(
  trained: trained_lib.Trained, mesh: jax.sharding.Mesh
) -> tuple[interfaces.Params, interfaces.Params]:
  """Shapes of the float32 params, and their shardings for training."""
  shapes, names = trained.shapes(), trained.logical_axes()
  axes.check_divisible(shapes, names, mesh, axes.TRAIN)
  return shapes, axes.shardings(names, mesh, axes.TRAIN)


@functools.lru_cache
def state_shardings(
  trained: trained_lib.Trained,
  mesh: jax.sharding.Mesh,
  settings: optimizers.OptimizerSettings,
) -> TrainState:
  """Shards the optimizer's arrays as their params, and replicates the rest."""
  optimizer = optimizers.make_optimizer(settings, trained)
  shapes, shardings = param_layout(trained, mesh)
  replicated = jax.NamedSharding(mesh, jax.P())
  known = {
    path: (shape.shape, sharding)
    for (path, shape), sharding in zip(
      jax.tree.leaves_with_path(shapes),
      jax.tree.leaves(shardings),
      strict=True,
    )
  }

  def find(path: tuple[Any, ...], array: jax.ShapeDtypeStruct) -> Any:
    """By the param whose path ends the path of the optimizer's array."""
    for start in range(len(path)):
      if path[start:] in known:
        return _sharding_like(array.shape, *known[path[start:]])
    return replicated

  opt_shapes = jax.eval_shape(optimizer.init, shapes)
  return TrainState(
    params=shardings,
    opt_state=jax.tree.map_with_path(find, opt_shapes),
    step=replicated,
    average=shardings if settings.average_decay else None,
  )


@functools.lru_cache
def make_create(
  trained: trained_lib.Trained,
  mesh: jax.sharding.Mesh,
  settings: optimizers.OptimizerSettings,
) -> Callable[[interfaces.Params], TrainState]:
  """Jits params -> a fresh state with a copy of them."""
  optimizer = optimizers.make_optimizer(settings, trained)

  def create(params: interfaces.Params) -> TrainState:
    # The copies keep jit from handing the caller's buffers on, which the first
    # update would then donate.
    copy = lambda: jax.tree.map(
      lambda x: jnp.copy(x).astype(jnp.float32), params
    )
    params32 = copy()
    return TrainState(
      params=params32,
      opt_state=optimizer.init(params32),
      step=jnp.zeros((), jnp.int32),
      average=copy() if settings.average_decay else None,
    )

  return jax.jit(create, out_shardings=state_shardings(trained, mesh, settings))


def abstract_state(
  trained: trained_lib.Trained,
  mesh: jax.sharding.Mesh,
  settings: optimizers.OptimizerSettings,
) -> TrainState:
  """Shapes, dtypes and shardings of a state, to restore into."""
  create = make_create(trained, mesh, settings)
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    jax.eval_shape(create, trained.shapes()),
    state_shardings(trained, mesh, settings),
  )


def _sharding_like(
  shape: tuple[int, ...],
  param_shape: tuple[int, ...],
  sharding: jax.NamedSharding,
) -> jax.NamedSharding:
  """Of an array of the param's shape, or of that without one of its axes."""
  spec = tuple(sharding.spec)
  if shape == param_shape:
    return sharding
  for axis in range(len(param_shape)):
    if shape == param_shape[:axis] + param_shape[axis + 1 :]:
      left = spec[:axis] + spec[axis + 1 :]
      return jax.NamedSharding(sharding.mesh, jax.P(*left))
  return jax.NamedSharding(sharding.mesh, jax.P())
