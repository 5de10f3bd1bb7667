"""The tables give the shardings; collisions and remainders are refused."""

import dataclasses

import jax
import numpy as np
import pytest

from dora_jax.parallel import axes

_NAMES = ("fsdp", "sequence", "tensor")
_MESH = jax.sharding.AbstractMesh((2, 4, 3), _NAMES)
P = jax.sharding.PartitionSpec


def test_shardings_follow_the_table():
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), _NAMES)
  names = {"gate": ("layer", "embed", "mlp"), "norm": ("norm",)}
  found = axes.shardings(names, mesh, axes.TRAIN)
  assert found["gate"].spec == P(None, ("fsdp", "sequence"), "tensor")
  assert found["norm"].spec == P(None)
  assert found["gate"].mesh == mesh
  assert axes.partition_spec(names["gate"], axes.DECODE) == P(
    None, None, "tensor"
  )


def test_a_mesh_axis_used_twice_is_refused():
  with pytest.raises(ValueError, match=r"'tensor' 2 times"):
    axes.partition_spec(("mlp", "vocab"), axes.TRAIN)
  both = dataclasses.replace(
    axes.DECODE, mesh_axis={**axes.DECODE.mesh_axis, "embed": "tensor"}
  )
  with pytest.raises(ValueError, match=r"\('embed', 'mlp'\).*'tensor'"):
    axes.partition_spec(("embed", "mlp"), both)
  with pytest.raises(ValueError, match=r"'sequence' 2 times"):
    axes.partition_spec(("token", "embed"), axes.TRAIN)


def test_an_unknown_axis_is_refused():
  with pytest.raises(ValueError, match="'expert'"):
    axes.partition_spec(("expert",), axes.TRAIN)


def test_both_tables_know_the_same_axes():
  assert axes.TRAIN.mesh_axis.keys() == axes.DECODE.mesh_axis.keys()


def test_what_devices_do_not_divide_is_named():
  shapes = {"key": jax.ShapeDtypeStruct((8, 4, 2), np.float32)}
  names = {"key": ("embed", "kv_head", "head_width")}
  with pytest.raises(
    ValueError,
    match=r"\['key'\] has 4 along 'kv_head'.* 3 devices.*trainer_tensor",
  ):
    axes.check_divisible(shapes, names, _MESH, axes.TRAIN)
  shapes = {"key": jax.ShapeDtypeStruct((12, 6, 2), np.float32)}
  with pytest.raises(
    ValueError,
    match=r"has 12 along 'embed', which 8 devices along 'fsdp' and 'sequence' "
    r".*trainer_fsdp \* config\.mesh\.trainer_sequence to a divisor of 12",
  ):
    axes.check_divisible(shapes, names, _MESH, axes.TRAIN)
  shapes = {"key": jax.ShapeDtypeStruct((8, 6, 2), np.float32)}
  axes.check_divisible(shapes, names, _MESH, axes.TRAIN)
