"""Which mesh axis each logical axis of an array is split over."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

# The mesh axes that one logical axis is split over; None replicates it.
MeshAxis = str | tuple[str, ...] | None

# An abstract one names devices that are not there, to plan for them.
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisTable:
  """Where the logical axes go on one kind of mesh.

  Attributes:
    mesh_axis: mesh axis of each logical axis, or several of them.
    config_field: the config field that sets the size of each mesh axis.
  """

  mesh_axis: Mapping[str, MeshAxis]
  config_field: Mapping[str, str]


# Fully sharded: weights are split over all devices that share rows and their
# tokens, so that each weight is gathered when its layer runs. No device of
# "sequence" has a copy of what another has: that memory is for long rows.
TRAIN = AxisTable(
  mesh_axis={
    "row": "fsdp",
    "token": "sequence",
    "vocab": "tensor",
    "embed": ("fsdp", "sequence"),
    "norm": None,
    "mlp": "tensor",
    "kv_head": "tensor",
    "query_group": None,
    "head_width": None,
    "rank": None,
    "layer": None,
  },
  config_field={
    "fsdp": "config.mesh.trainer_fsdp",
    "sequence": "config.mesh.trainer_sequence",
    "tensor": "config.mesh.trainer_tensor",
  },
)

# Decoding reads every weight for every token, so none is gathered.
DECODE = AxisTable(
  mesh_axis={
    "row": None,
    "token": None,
    "vocab": "tensor",
    "embed": None,
    "norm": None,
    "mlp": "tensor",
    "kv_head": "tensor",
    "query_group": None,
    "head_width": None,
    "layer": None,
    "rank": None,
  },
  config_field={"tensor": "config.mesh.generator_tensor"},
)


def _is_axes(node: Any) -> bool:
  return isinstance(node, tuple)


def partition_spec(
  axes: tuple[str, ...], table: AxisTable
) -> jax.sharding.PartitionSpec:
  """The mesh axes of one array; refuses to use a mesh axis twice."""
  for axis in axes:
    if axis not in table.mesh_axis:
      raise ValueError(
        f"The logical axis {axis!r} of {axes} is in no row of the axis table, "
        f"which has {sorted(table.mesh_axis)}: add it in parallel/axes.py."
      )
  mesh_axes = [table.mesh_axis[axis] for axis in axes]
  counts = collections.Counter(
    name for mesh_axis in mesh_axes for name in _names(mesh_axis)
  )
  repeated = [axis for axis, count in counts.items() if count > 1]
  if repeated:
    raise ValueError(
      f"The logical axes {axes} use the mesh axis {repeated[0]!r} "
      f"{counts[repeated[0]]} times but an array can be split over it once: "
      "change the table in parallel/axes.py."
    )
  return jax.sharding.PartitionSpec(*mesh_axes)


def shardings(logical_axes: Any, mesh: AnyMesh, table: AxisTable) -> Any:
  """The tree of tuples of axis names as a tree of NamedSharding."""
  return jax.tree.map(
    lambda axes: jax.sharding.NamedSharding(mesh, partition_spec(axes, table)),
    logical_axes,
    is_leaf=_is_axes,
  )


def check_divisible(
  shapes: Any, logical_axes: Any, mesh: AnyMesh, table: AxisTable
) -> None:
  """Raises where devices do not divide an axis that is split over them.

  Args:
    shapes: tree of what has a `shape`, such as jax.ShapeDtypeStruct.
    logical_axes: the same tree with a tuple of axis names for each array.
    mesh: whose axes the table names.
    table: TRAIN or DECODE.
  """
  named_axes = jax.tree.leaves_with_path(logical_axes, is_leaf=_is_axes)
  arrays = jax.tree.leaves(shapes)
  for (path, axes), array in zip(named_axes, arrays, strict=True):
    for axis, size in zip(axes, array.shape, strict=True):
      names = _names(table.mesh_axis[axis])
      num_shares = math.prod(mesh.shape[name] for name in names)
      if size % num_shares == 0:
        continue
      fields = " * ".join(table.config_field[name] for name in names)
      raise ValueError(
        f"params{jax.tree_util.keystr(path)} has {size} along {axis!r}, which "
        f"{num_shares} devices along {' and '.join(map(repr, names))} do not "
        f"divide: set {fields} to a divisor of {size}."
      )


def _names(mesh_axis: MeshAxis) -> tuple[str, ...]:
  """The mesh axes, none or one or several."""
  if mesh_axis is None:
    return ()
  return mesh_axis if isinstance(mesh_axis, tuple) else (mesh_axis,)
