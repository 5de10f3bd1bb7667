"""Compiles a generator's verbs for devices that are not there.

A TPU program needs no TPU to be compiled: libtpu and the description of a slice
do. So what does not fit, or does not lower, shows before anybody waits for one.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from dora_jax.generator import engine, prefill, verbs
from dora_jax.generator.attention import base
from dora_jax.model import transformer
from dora_jax.parallel import axes


def describe_mesh(topology: str, *, tensor: int) -> Mesh:
  """A generator mesh of TPUs that are not there.

  Args:
    topology: of the slice, such as "v5p:2x2x1".
    tensor: devices of the mesh; the slice's first ones.
  """
  described = topologies.get_topology_desc(
    platform="tpu", topology_name=topology
  )
  devices = np.array(described.devices[:tensor], dtype=object)
  auto = (jax.sharding.AxisType.Auto,)
  return Mesh(devices, ("tensor",), axis_types=auto)


def compile_verbs(
  mesh: Mesh,
  config: transformer.ModelConfig,
  paged: base.PagedAttention,
  *,
  num_slots: int,
  num_pages: int,
  page_size: int,
  max_length: int,
  chunk_steps: int,
  prefill_chunk: int,
  dtype: DTypeLike,
) -> dict[str, jax.stages.Compiled]:
  """Compiles decode and prefill as an engine would.

  Args:
    mesh: as `describe_mesh` gives it, or a real one.
    config: sizes of the model.
    paged: how to attend over pages.
    num_slots: requests decoded at once.
    num_pages: of the KV pool.
    page_size: token positions of a page.
    max_length: most tokens of a sequence.
    chunk_steps: decode steps of a call.
    prefill_chunk: most tokens of a call of prefill.
    dtype: of params and pool.

  Returns:
    What was compiled, by the verb's name.
  """
  everywhere = NamedSharding(mesh, PartitionSpec())
  ints = lambda *shape: jax.ShapeDtypeStruct(
    shape, jnp.int32, sharding=everywhere
  )
  params = _place(
    transformer.abstract_params(config, dtype=dtype),
    axes.shardings(transformer.logical_axes(config), mesh, axes.DECODE),
  )
  pool = jax.eval_shape(
    lambda: paged.create_pool(
      config,
      mesh=mesh,
      num_pages=num_pages,
      page_size=page_size,
      dtype=dtype,
    )
  )
  pool = jax.tree.map(lambda kv: _place(kv, paged.sharding(mesh)), pool)
  sizes = prefill.choose_sizes(
    page_size=page_size,
    prefill_chunk=prefill_chunk,
    max_length=max_length,
    platform=mesh.devices.flat[0].platform,
  )
  slots = jax.eval_shape(
    lambda: verbs.create_slots(num_slots, sizes.table_width)
  )
  slots = jax.tree.map(lambda rows: _place(rows, everywhere), slots)
  jitted = engine.jit_verbs(mesh, config, paged, chunk_steps, (0,))
  served = verbs.Served(version=ints(), params=params)
  block = prefill.Block(
    tokens=np.zeros(page_size, np.int32), start=0, page_ids=[1], filled=[1]
  )
  (call,) = prefill.gather([block], sizes=sizes, page_size=page_size)
  call = jax.tree.map(lambda rows: ints(*rows.shape), call)
  lowered = {
    "decode": jitted.decode.lower(served, pool, slots, ints()),
    "prefill": jitted.prefill.lower(params, pool, call),
  }
  return {name: verb.compile() for name, verb in lowered.items()}


def _place(arrays, shardings):
  """Says where each of these abstract arrays is."""
  return jax.tree.map(
    lambda array, where: jax.ShapeDtypeStruct(
      array.shape, array.dtype, sharding=where
    ),
    arrays,
    shardings,
  )
