"""One declaration gives a weight its shape, its axes' names and its init."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Draw = Callable[[tuple[int, ...]], jax.Array]


@dataclasses.dataclass(frozen=True)
class Declare:
  """Makes weights of their axes' names, from which their shapes follow.

  Attributes:
    axis_sizes: size of each logical axis.
    draw: an array of this shape of standard normals.
    dtype: of the weights.
  """

  axis_sizes: Mapping[str, int]
  draw: Draw
  dtype: Any

  def normal(self, *axes: str, fan_in: int) -> nnx.Param:
    """Normals of variance 1 / fan_in, which keep the scale of what comes in."""
    noise = self.draw(self._shape(axes)) * fan_in**-0.5
    return nnx.Param(noise.astype(self.dtype), axes=axes)

  def constant(self, *axes: str, value: float) -> nnx.Param:
    """The same value throughout."""
    array = jnp.full(self._shape(axes), value, self.dtype)
    return nnx.Param(array, axes=axes)

  def _shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(self.axis_sizes[axis] for axis in axes)


def build(make: Callable[[Draw], Any], key: jax.Array) -> Any:
  """Makes a module with random weights.

  All its weights are pieces of one long draw: XLA takes about a second of CPU
  to compile each call of the generator, and a model has a dozen weights.
  """
  noise = jax.random.normal(key, (_count_draws(make),))
  used = 0

  def draw(shape: tuple[int, ...]) -> jax.Array:
    nonlocal used
    start, used = used, used + math.prod(shape)
    return noise[start:used].reshape(shape)

  return make(draw)


def build_layers(make: Callable[[Draw], Any], keys_L: jax.Array) -> Any:
  """Makes a module whose weights are stacked on a leading axis, one a key.

  One layer after the other, so that the draws of one layer are held at a time.
  """
  structure, _ = nnx.split(nnx.eval_shape(lambda: make(jnp.zeros)))
  states = jax.lax.map(lambda key: nnx.state(build(make, key)), keys_L)
  return nnx.merge(structure, states)


def read_axes(state: Any) -> Any:
  """The axes' names that the weights of a module's state were declared with."""
  names = jax.tree.map(
    lambda weight: weight.get_metadata()["axes"],
    state,
    is_leaf=lambda node: isinstance(node, nnx.Variable),
  )
  return nnx.to_pure_dict(names)


def _count_draws(make: Callable[[Draw], Any]) -> int:
  num_draws = 0

  def draw(shape: tuple[int, ...]) -> jax.Array:
    nonlocal num_draws
    num_draws += math.prod(shape)
    return jnp.zeros(shape)

  nnx.eval_shape(lambda: make(draw))
  return num_draws
