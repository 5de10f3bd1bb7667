"""A layer's matrix as a frozen base and two factors of what is added to it.

trainer/lora.py says what for.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
  """weight = base + scale * a b, the product over b's first axis, the rank.

  Attributes:
    base: of the weight's shape.
    a: the axes that a product with the weight sums over, then the rank.
    b: the rank, then the weight's other axes.
    scale: a number.
  """

  base: Any
  a: Any
  b: Any
  scale: float = dataclasses.field(metadata={"static": True})


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


def _merge(weight: Weight) -> Array:
  added = jnp.tensordot(
    weight.a, weight.b, axes=1, preferred_element_type=jnp.float32
  )
  # Rounded once, as generators round what is published.
  merged = weight.base.astype(jnp.float32) + weight.scale * added
  return merged.astype(weight.base.dtype)
