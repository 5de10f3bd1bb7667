"""Matrices turned around, their outputs first, for generators on CPUs.

XLA's product of few rows and a weight packs the weight anew each time. One that
puts the weight first reads it as it lies, if the axes that are summed over come
last. benchmarks/README.md says what that gains.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

# From so many rows on XLA takes another way, that gains nothing by the order.
_MANY_ROWS = 64
# Rows are lanes of the vectors that they are computed in. A few at the end, in
# a shorter vector, would be rounded otherwise.
_VECTOR_ROWS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Turned:
  """A matrix of one layer, turned.

  Attributes:
    values: the axes of its output, then those that a product sums over.
  """

  values: Any


def turn(weight: Array, num_summed: int) -> Turned:
  """A copy of a matrix, turned, and split over devices as before.

  Args:
    weight: the axes that a product sums over, then those of the output.
    num_summed: how many it sums over.
  """
  order = (*range(num_summed, weight.ndim), *range(num_summed))
  values = weight.transpose(order)
  sharding = weight.sharding
  if isinstance(sharding, NamedSharding):
    names = (*sharding.spec, *[None] * weight.ndim)
    spec = PartitionSpec(*(names[axis] for axis in order))
    values = jax.device_put(values, NamedSharding(sharding.mesh, spec))
  return Turned(values=values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined:
  """Several turned matrices, for one product of the same activations.

  It stands where the first of them was, `Within` where the others were.

  Attributes:
    values: the outputs of all, one after the other, then the axis that a
      product sums over.
    shapes: of the outputs of each.
  """

  values: Any
  shapes: tuple[tuple[int, ...], ...] = dataclasses.field(
    metadata={"static": True}
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Within:
  """Where a matrix was that is joined with the one before."""


def join(weights: Sequence[Turned]) -> Joined:
  """A copy of turned matrices that sum over the same, single axis."""
  flat = [each.values.reshape(-1, each.values.shape[-1]) for each in weights]
  return Joined(
    values=jnp.concatenate(flat),
    shapes=tuple(each.values.shape[:-1] for each in weights),
  )


def joined_products(
  rows: Float[jax.Array, "..."], weight: Joined
) -> tuple[Float[jax.Array, "..."], ...]:
  """`product` with each of the matrices that were joined."""
  sizes = [math.prod(shape) for shape in weight.shapes]
  ends = [sum(sizes[: index + 1]) for index in range(len(sizes) - 1)]
  parts = jnp.split(product(rows, weight.values), ends, axis=-1)
  return tuple(
    part.reshape(*rows.shape[:-1], *shape)
    for part, shape in zip(parts, weight.shapes, strict=True)
  )


def product(
  rows: Float[jax.Array, "..."],
  weight: Float[jax.Array, "..."],
  *,
  num_summed: int = 1,
  dtype: jax.typing.DTypeLike | None = None,
) -> Float[jax.Array, "..."]:
  """Activations times the values of a turned matrix.

  On a CPU a row comes out the same, bit by bit, wherever it stands among up to
  63, and wherever it stands among more; but not by the one as by the other.

  Args:
    rows: activations; their last axes are summed over.
    weight: of the same dtype; the axes of the output, then those.
    num_summed: axes that it sums over.
    dtype: of the result; None is that of the activations.
  """
  lead, summed = rows.shape[:-num_summed], rows.shape[-num_summed:]
  rows = rows.reshape(-1, *summed)
  num_rows, num_outputs = rows.shape[0], weight.ndim - num_summed
  of_rows = tuple(range(1, rows.ndim))
  of_weight = tuple(range(num_outputs, weight.ndim))

  def rows_first(rows, weight):
    axes = (of_rows, of_weight), ((), ())
    return jax.lax.dot_general(rows, weight, axes, preferred_element_type=dtype)

  def weight_first(rows, weight):
    padding = [(0, -num_rows % _VECTOR_ROWS), *[(0, 0)] * num_summed]
    rows = jnp.pad(rows, padding)
    axes = (of_weight, of_rows), ((), ())
    out = jax.lax.dot_general(weight, rows, axes, preferred_element_type=dtype)
    # Else XLA would swap the two again, to spare itself a small transpose.
    out = jax.lax.optimization_barrier(out)
    return jnp.moveaxis(out, -1, 0)[:num_rows]

  if num_rows < _MANY_ROWS:
    out = jax.lax.platform_dependent(
      rows, weight, cpu=weight_first, default=rows_first
    )
  else:
    out = rows_first(rows, weight)
  return out.reshape(*lead, *out.shape[1:])
