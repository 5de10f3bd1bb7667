"""What an optimizer trains: all of a policy, adapters of it, or a critic."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from dora_jax import interfaces
from dora_jax.model import matrices, transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixAxes:
  """How a param of many axes is a matrix, or one for each of the other axes.

  Attributes:
    summed: axes that the product sums over.
    output: axes of what the product gives.
  """

  summed: tuple[int, ...]
  output: tuple[int, ...]


@runtime_checkable
class Trained(Protocol):
  """Describes params that are trained; hashable, for functions are cached."""

  @property
  def base(self) -> "Policy | None":
    """Describes what is frozen; None where all is trained."""
    ...

  def shapes(self) -> interfaces.Params:
    """A jax.ShapeDtypeStruct in float32 for each array."""
    ...

  def logical_axes(self) -> interfaces.Params:
    """The names of the axes of each array."""
    ...

  def matrix_axes(self) -> interfaces.Params:
    """MatrixAxes of the layers' matrices; None for all other arrays."""
    ...

  def whole(self, params: Any, frozen: Any) -> interfaces.Params:
    """The params that a forward pass takes.

    Args:
      params: what is trained.
      frozen: what is not; None where all is trained.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Policy:
  """All params of a policy.

  Attributes:
    config: of the model.
  """

  config: transformer.ModelConfig
  base = None

  def shapes(self) -> interfaces.Params:
    """See Trained."""
    return transformer.abstract_params(self.config, dtype=jnp.float32)

  def logical_axes(self) -> interfaces.Params:
    """See Trained."""
    return transformer.logical_axes(self.config)

  def matrix_axes(self) -> interfaces.Params:
    """See Trained."""
    axes = jax.tree.map(lambda _: None, self.shapes())
    blocks = {
      name: _matrix_axes(name, len(leaf.shape))
      for name, leaf in self.shapes()["blocks"].items()
    }
    return axes | {"blocks": blocks}

  def whole(self, params: Any, frozen: Any) -> interfaces.Params:
    """See Trained."""
    del frozen
    return params


def _matrix_axes(name: str, num_axes: int) -> MatrixAxes | None:
  if name not in matrices.NUM_SUMMED:
    return None
  # The first axis is that of the layers.
  first_output = 1 + matrices.NUM_SUMMED[name]
  return MatrixAxes(
    summed=tuple(range(1, first_output)),
    output=tuple(range(first_output, num_axes)),
  )


@dataclasses.dataclass(frozen=True)
class Critic:
  """A critic: a policy's layers as "trunk" and a linear head, "value".

  Attributes:
    config: of the policy.
  """

  config: transformer.ModelConfig
  base = None

  def shapes(self) -> interfaces.Params:
    """See Trained."""
    value = jax.ShapeDtypeStruct((self.config.width,), jnp.float32)
    return {"trunk": self._trunk.shapes(), "value": value}

  def logical_axes(self) -> interfaces.Params:
    """See Trained."""
    return {"trunk": self._trunk.logical_axes(), "value": ("embed",)}

  def matrix_axes(self) -> interfaces.Params:
    """See Trained."""
    return {"trunk": self._trunk.matrix_axes(), "value": None}

  def whole(self, params: Any, frozen: Any) -> interfaces.Params:
    """See Trained."""
    del frozen
    return params

  def start(self, params: interfaces.Params) -> interfaces.Params:
    """A critic's params from a policy's: its values are 0."""
    trunk = {name: params[name] for name in self._trunk.shapes()}
    return {"trunk": trunk, "value": jnp.zeros(self.config.width)}

  @property
  def _trunk(self) -> Policy:
    return Policy(trunk_config(self.config))


def trunk_config(config: transformer.ModelConfig) -> transformer.ModelConfig:
  """The model's shape without an output head of its own."""
  return dataclasses.replace(config, tied_head=True)
