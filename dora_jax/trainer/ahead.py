"""Compiles a train step for devices that are not there.

A TPU program needs no TPU to be compiled: libtpu and the description of a slice
do. So what does not fit, or does not lower, shows before anybody waits for one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from dora_jax.parallel import meshes
from dora_jax.trainer import (
  accumulation,
  device_batch,
  gradients,
  optimizers,
  train_state,
)
from dora_jax.trainer import trained as trained_lib


def describe_mesh(
  topology: str, *, fsdp: int, sequence: int, tensor: int
) -> Mesh:
  """A trainer mesh of TPUs that are not there.

  Args:
    topology: of the slice, such as "v5p:2x2x4".
    fsdp: devices that share each weight and the rows of a batch.
    sequence: devices that share each weight and the tokens of a row.
    tensor: devices that share the heads and the MLP.
  """
  described = topologies.get_topology_desc(
    platform="tpu", topology_name=topology
  )
  return meshes.make_trainer_mesh(
    described.devices[: fsdp * sequence * tensor],
    fsdp=fsdp,
    sequence=sequence,
    tensor=tensor,
  )


def compile_step(
  mesh: Mesh,
  settings: gradients.LossSettings,
  optimizer: optimizers.OptimizerSettings,
  *,
  row_length: int,
  rows_per_batch: int,
  num_batches: int,
) -> dict[str, jax.stages.Compiled]:
  """Compiles the two programs of a step as a trainer would.

  Args:
    mesh: as `describe_mesh` gives it, or a real one.
    settings: of the loss.
    optimizer: of the update.
    row_length: tokens of a row.
    rows_per_batch: rows of a micro-batch, over all devices.
    num_batches: micro-batches of the step.

  Returns:
    "accumulate", of the micro-batches, and "update".
  """
  trained = trained_lib.Policy(settings.config)
  shapes, shardings = train_state.param_layout(trained, mesh)
  params = _place(shapes, shardings)
  state = train_state.abstract_state(trained, mesh, optimizer)
  batches = {
    name: jax.ShapeDtypeStruct(
      (num_batches, rows_per_batch, row_length),
      dtype,
      sharding=accumulation.stacked_sharding(mesh),
    )
    for name, dtype in device_batch.FIELDS.items()
  }
  # Jitted functions, whatever a type checker makes of their cache.
  accumulate: Any = accumulation.make_scan(
    gradients.policy_loss, settings, trained, mesh
  )
  update: Any = gradients.make_update(trained, mesh, optimizer)
  count = jax.ShapeDtypeStruct((), jnp.int32)
  denominator = jax.ShapeDtypeStruct((), jnp.float32)
  lowered = {
    "accumulate": accumulate.lower(
      params, None, params, batches, count, denominator
    ),
    "update": update.lower(state, params),
  }
  return {name: program.compile() for name, program in lowered.items()}


def _place(arrays, shardings):
  """Says where each of these abstract arrays is."""
  return jax.tree.map(
    lambda array, where: jax.ShapeDtypeStruct(
      array.shape, array.dtype, sharding=where
    ),
    arrays,
    shardings,
  )
