"""Pages in int8, for the attention in plain XLA: a quarter of float32's bytes.

A token's keys of one head share a scale, and so do its values:

  scale = max |row| / 127, int8 row = round(row / scale)

so what is written for a token depends on nothing else, and pages can be moved,
shared and filled one by one as in any other dtype.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

_LARGEST = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Pages:
  """Keys or values of a pool, rounded.

  Attributes:
    rows: int8, laid out as in any other dtype.
    scale_LJKO: fp32, one for each layer, page, head and position.
  """

  rows: Any
  scale_LJKO: Any


def create(
  shape: tuple[int, ...], *, page_size: int, where: NamedSharding
) -> Int8Pages:
  """Pages of zeros; the first three axes are layers, pages, heads."""
  return Int8Pages(
    rows=jnp.zeros(shape, jnp.int8, device=where),
    scale_LJKO=jnp.zeros((*shape[:3], page_size), jnp.float32, device=where),
  )


def quantize(
  rows: Float[Array, "... H"],
) -> tuple[jax.Array, Float[Array, "..."]]:
  """Rounds rows of a head to int8; returns them and their scales."""
  wide = rows.astype(jnp.float32)
  largest = jnp.abs(wide).max(axis=-1)
  # A row of zeros stays one.
  scale = jnp.where(largest > 0, largest, 1.0) / _LARGEST
  return jnp.round(wide / scale[..., None]).astype(jnp.int8), scale
