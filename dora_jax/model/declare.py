"""One declaration gives a weight its shape, its axes' names and its init."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

ONES = jax.nn.initializers.ones
ZEROS = jax.nn.initializers.zeros


def normal(fan_in: int) -> jax.nn.initializers.Initializer:
  """Draws with variance 1 / fan_in, which keeps the scale of what comes in."""
  return jax.nn.initializers.normal(fan_in**-0.5)


@dataclasses.dataclass(frozen=True)
class Declare:
  """Makes weights of their axes' names, from which their shapes follow.

  Attributes:
    axis_sizes: size of each logical axis.
    rngs: where the draws come from.
    dtype: of the weights.
  """

  axis_sizes: Mapping[str, int]
  rngs: nnx.Rngs
  dtype: Any

  def __call__(
    self, *axes: str, init: jax.nn.initializers.Initializer
  ) -> nnx.Param:
    """A weight with these axes."""
    shape = tuple(self.axis_sizes[axis] for axis in axes)
    return nnx.Param(init(self.rngs.params(), shape, self.dtype), axes=axes)
