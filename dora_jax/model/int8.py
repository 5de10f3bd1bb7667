"""Weights in int8, for generators: half of bfloat16's bytes to read.

The matrices of the layers are rounded; embedding, output head, norms and biases
stay as they are. A generator reads all weights for every token, so that bytes
are what decoding costs; the arithmetic stays in the weights' former dtype.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dora_jax import interfaces
from dora_jax.model import matrices

_LARGEST = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Weight:
  """A matrix of each layer, rounded; weight = values * scale.

  Attributes:
    values: int8, of the weight's shape.
    scale: in the weight's former dtype, one for each output channel; without
      the axes that the product sums over.
  """

  values: Any
  scale: Any


def quantize(params: interfaces.Params) -> interfaces.Params:
  """Rounds the layers' matrices to int8, each output channel by its largest.

  scale[c] = max |weight[:, c]| / 127, values = round(weight / scale)

  Source: LLM.int8(), section 3 (https://arxiv.org/abs/2208.07339).

  Args:
    params: as `transformer.init_params` makes them.

  Returns:
    The same tree with an Int8Weight for each matrix of the layers.
  """
  return _replace_matrices(params, _quantize)


def logical_axes(axes: Any) -> Any:
  """The axes' names of what `quantize` gives, from those of its params."""

  def split(names: tuple[str, ...], num_summed: int) -> Int8Weight:
    layer, *rest = names
    return Int8Weight(values=names, scale=(layer, *rest[num_summed:]))

  return _replace_matrices(axes, split)


def dequantize(tree: Any) -> Any:
  """The tree with an array again for each Int8Weight of one layer."""
  is_rounded = lambda node: isinstance(node, Int8Weight)
  return jax.tree.map(
    lambda node: _dequantize(node) if is_rounded(node) else node,
    tree,
    is_leaf=is_rounded,
  )


def _replace_matrices(params: Any, replace: Any) -> Any:
  blocks = {
    name: replace(leaf, matrices.NUM_SUMMED[name])
    if name in matrices.NUM_SUMMED
    else leaf
    for name, leaf in params["blocks"].items()
  }
  return params | {"blocks": blocks}


def _quantize(weight: Array, num_summed: int) -> Int8Weight:
  # The first axis is that of the layers.
  summed = tuple(range(1, 1 + num_summed))
  weight32 = weight.astype(jnp.float32)
  scale = jnp.abs(weight32).max(axis=summed, keepdims=True) / _LARGEST
  # What is multiplied by later is the rounded scale, so that is divided by.
  scale = scale.astype(weight.dtype)
  divisor = jnp.where(scale == 0, 1, scale).astype(jnp.float32)
  values = jnp.round(weight32 / divisor).clip(-_LARGEST, _LARGEST)
  return Int8Weight(
    values=values.astype(jnp.int8), scale=scale.squeeze(axis=summed)
  )


def _dequantize(weight: Int8Weight) -> Array:
  missing = weight.values.ndim - weight.scale.ndim
  scale = jax.lax.expand_dims(weight.scale, range(missing))
  return weight.values.astype(scale.dtype) * scale
