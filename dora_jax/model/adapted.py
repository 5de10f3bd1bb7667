"""A layer's matrix as a frozen base and two factors of what is added to it.

trainer/lora.py says what for. Many Weights may have one base: versions of a
policy that differ by their factors alone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dora_jax import interfaces
from dora_jax.model import turned


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
  """weight = base + scale * a b, the product over b's first axis, the rank.

  Attributes:
    base: of the weight's shape, or turned.
    a: the axes that a product with the weight sums over, then the rank.
    b: the rank, then the weight's other axes.
    scale: a number.
  """

  base: Any
  a: Any
  b: Any
  scale: float = dataclasses.field(metadata={"static": True})


def join(
  params: interfaces.Params, factors: interfaces.Params, *, scale: float
) -> interfaces.Params:
  """The params with a Weight for each matrix that has factors.

  Args:
    params: the base, as `transformer.init_params` or `layer_list.unstack`
      makes them; stay in use as they are, so that many may share them.
    factors: {"blocks": {name: {"a": ..., "b": ...}}}, or a list of such blocks
      where the params have one.
    scale: of what is added.
  """

  def adapt(block, pairs):
    return block | {
      name: Weight(base=block[name], scale=scale, **pair)
      for name, pair in pairs.items()
    }

  blocks, pairs = params["blocks"], factors["blocks"]
  if isinstance(blocks, list):
    adapted = [adapt(*each) for each in zip(blocks, pairs, strict=True)]
  else:
    adapted = adapt(blocks, pairs)
  return params | {"blocks": adapted}


def merge(tree: Any) -> Any:
  """The tree with an array for each Weight of one layer."""
  return jax.tree.map(
    lambda node: _merge(node) if _is_adapted(node) else node,
    tree,
    is_leaf=_is_adapted,
  )


def merge_layers(tree: Any) -> Any:
  """The tree with an array for each Weight, stacked over the layers."""
  return jax.tree.map(
    lambda node: jax.vmap(_merge)(node) if _is_adapted(node) else node,
    tree,
    is_leaf=_is_adapted,
  )


def _is_adapted(node: Any) -> bool:
  return isinstance(node, Weight)


def _merge(weight: Weight) -> Array | turned.Turned:
  if isinstance(weight.base, turned.Turned):
    added = _multiply(weight.b, weight.a, axes=((0,), (-1,)))
    return turned.Turned(values=_add(weight.base.values, weight.scale * added))
  added = _multiply(weight.a, weight.b, axes=1)
  return _add(weight.base, weight.scale * added)


def _multiply(left: Array, right: Array, *, axes: Any) -> Array:
  return jnp.tensordot(
    left, right, axes=axes, preferred_element_type=jnp.float32
  )


def _add(base: Array, added: Array) -> Array:
  # Rounded once, as generators round what is published.
  return (base.astype(jnp.float32) + added).astype(base.dtype)
