"""Device meshes: one for the trainer, one for each generator."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meshes:
  """Who computes where.

  Attributes:
    trainer: with axes ("fsdp", "sequence", "tensor").
    generators: each with the axis ("tensor",).
  """

  trainer: jax.sharding.Mesh
  generators: tuple[jax.sharding.Mesh, ...]


def split_devices(
  devices: Sequence[Any],
  *,
  trainer_fsdp: int,
  trainer_sequence: int,
  trainer_tensor: int,
  num_generators: int,
  generator_tensor: int,
  colocated: bool,
) -> Meshes:
  """Gives the trainer the first devices and the generators the next ones.

  Args:
    devices: of jax.devices(), neighbours near each other.
    trainer_fsdp: devices that share each weight and the rows of a batch.
    trainer_sequence: devices that share each weight and the tokens of a row.
    trainer_tensor: devices that share the heads and the MLP.
    num_generators: generator meshes.
    generator_tensor: devices of each generator mesh.
    colocated: whether the generators take turns on the trainer's devices
      instead of having their own.
  """
  asked = {
    "config.mesh.trainer_fsdp": trainer_fsdp,
    "config.mesh.trainer_sequence": trainer_sequence,
    "config.mesh.trainer_tensor": trainer_tensor,
    "config.mesh.num_generators": num_generators,
    "config.mesh.generator_tensor": generator_tensor,
  }
  for field, count in asked.items():
    if count < 1:
      raise ValueError(f"{field} is {count} but must be at least 1.")
  num_trainer = trainer_fsdp * trainer_sequence * trainer_tensor
  if colocated:
    _check_colocated(num_trainer, generator_tensor)
    starts = [
      index * generator_tensor % num_trainer for index in range(num_generators)
    ]
    num_needed = num_trainer
  else:
    starts = [
      num_trainer + index * generator_tensor for index in range(num_generators)
    ]
    num_needed = num_trainer + num_generators * generator_tensor
  if num_needed > len(devices):
    settings = ", ".join(f"{field} = {n}" for field, n in asked.items())
    raise ValueError(
      f"The meshes need {num_needed} devices ({settings}, "
      f"config.mesh.colocated = {colocated}) but there are {len(devices)}: "
      "lower one of these fields, or colocate."
    )
  return Meshes(
    trainer=make_trainer_mesh(
      devices[:num_trainer],
      fsdp=trainer_fsdp,
      sequence=trainer_sequence,
      tensor=trainer_tensor,
    ),
    generators=tuple(
      _mesh(
        np.array(devices[start : start + generator_tensor], dtype=object),
        ("tensor",),
      )
      for start in starts
    ),
  )


def make_trainer_mesh(
  devices: Sequence[Any], *, fsdp: int, sequence: int, tensor: int
) -> jax.sharding.Mesh:
  """A mesh as the trainer takes it, of fsdp * sequence * tensor devices.

  The axis that talks most is the last, among neighbours.

  Args:
    devices: neighbours near each other.
    fsdp: devices that share each weight and the rows of a batch.
    sequence: devices that share each weight and the tokens of a row.
    tensor: devices that share the heads and the MLP.
  """
  grid = np.array(devices, dtype=object).reshape(fsdp, sequence, tensor)
  return _mesh(grid, ("fsdp", "sequence", "tensor"))


def _mesh(devices: np.ndarray, names: tuple[str, ...]) -> jax.sharding.Mesh:
  # Auto: XLA propagates shardings; the layers state none.
  auto = (jax.sharding.AxisType.Auto,) * len(names)
  return jax.sharding.Mesh(devices, names, axis_types=auto)


def _check_colocated(num_trainer: int, generator_tensor: int) -> None:
  if num_trainer % generator_tensor:
    raise ValueError(
      f"config.mesh.generator_tensor is {generator_tensor}, which must divide "
      f"the trainer's {num_trainer} devices (config.mesh.trainer_fsdp * "
      "trainer_sequence * trainer_tensor) where config.mesh.colocated is set."
    )
