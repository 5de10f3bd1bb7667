"""Low-rank adapters: what is trained in place of the layers' matrices.

A matrix W of each layer becomes W + scale * A B, in which W is frozen, A maps
its input to `rank` numbers and B these to its output; scale = alpha / rank. B
starts at 0, so that the policy starts as it was.
Source: LoRA, section 4.1 (https://arxiv.org/abs/2106.09685).

Weights, not activations, are added up: one layer's W + scale * A B exists at a
time, in the pass through that layer. The gradients of A and B are those of the
chain rule through it, so that generators may be given the sum, or the base once
and then A and B alone.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from dora_jax import interfaces
from dora_jax.model import adapted, matrices, transformer
from dora_jax.trainer import trained as trained_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Which adapters there are.

  Attributes:
    rank: of each.
    alpha: the adapters' product counts alpha / rank times.
    targets: names of matrices.NUM_SUMMED.
    seed: of A.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...]
  seed: int

  @property
  def scale(self) -> float:
    """How often the product of two factors counts."""
    return self.alpha / self.rank


def check(settings: Settings) -> None:
  """Refuses adapters of what is not there.

  Raises:
    ValueError: says what is found, what is needed, and the field to change.
  """
  unknown = sorted({*settings.targets} - {*matrices.NUM_SUMMED})
  if unknown or not settings.targets:
    raise ValueError(
      f"config.trainer.lora_targets is {settings.targets} but must be some of "
      f"{tuple(matrices.NUM_SUMMED)}."
    )


@dataclasses.dataclass(frozen=True)
class Adapters:
  """Params of the adapters alone; see trained.Trained.

  Attributes:
    config: of the model.
    settings: which there are.
  """

  config: transformer.ModelConfig
  settings: Settings

  @property
  def base(self) -> trained_lib.Policy:
    """See Trained."""
    return trained_lib.Policy(self.config)

  def shapes(self) -> interfaces.Params:
    """See Trained."""
    shapes = self.base.shapes()["blocks"]
    rank = self.settings.rank

    def pair(name: str) -> dict[str, Any]:
      layer, *rest = shapes[name].shape
      num_summed = matrices.NUM_SUMMED[name]
      inputs, outputs = rest[:num_summed], rest[num_summed:]
      return {
        "a": jax.ShapeDtypeStruct((layer, *inputs, rank), jnp.float32),
        "b": jax.ShapeDtypeStruct((layer, rank, *outputs), jnp.float32),
      }

    return {"blocks": {name: pair(name) for name in self.settings.targets}}

  def logical_axes(self) -> interfaces.Params:
    """See Trained."""
    axes = self.base.logical_axes()["blocks"]

    def pair(name: str) -> dict[str, Any]:
      layer, *rest = axes[name]
      num_summed = matrices.NUM_SUMMED[name]
      return {
        "a": (layer, *rest[:num_summed], "rank"),
        "b": (layer, "rank", *rest[num_summed:]),
      }

    return {"blocks": {name: pair(name) for name in self.settings.targets}}

  def matrix_axes(self) -> interfaces.Params:
    """See Trained."""
    shapes = self.shapes()["blocks"]

    def pair(name: str) -> dict[str, Any]:
      first_rank = 1 + matrices.NUM_SUMMED[name]
      num_axes = len(shapes[name]["b"].shape)
      return {
        "a": trained_lib.MatrixAxes(
          summed=tuple(range(1, first_rank)), output=(first_rank,)
        ),
        "b": trained_lib.MatrixAxes(
          summed=(1,), output=tuple(range(2, num_axes))
        ),
      }

    return {"blocks": {name: pair(name) for name in self.settings.targets}}

  def whole(self, params: Any, frozen: Any) -> interfaces.Params:
    """The base with an adapted.Weight for each target."""
    return adapted.join(frozen, params, scale=self.settings.scale)

  def start(self) -> interfaces.Params:
    """Normals of variance 1 / inputs for A, and 0 for B."""
    shapes = self.shapes()["blocks"]
    key = jax.random.key(self.settings.seed)
    blocks = {}
    for index, (name, pair) in enumerate(sorted(shapes.items())):
      num_inputs = math.prod(pair["a"].shape[1:-1])
      noise = jax.random.normal(jax.random.fold_in(key, index), pair["a"].shape)
      blocks[name] = {
        "a": noise * num_inputs**-0.5,
        "b": jnp.zeros(pair["b"].shape),
      }
    return {"blocks": blocks}
