"""Which attention over pages a generator mesh takes."""

import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dora_jax.generator.attention import base, gpu, tpu, xla
from dora_jax.model import transformer
from dora_jax.parallel import kernel_choice


def choose(
  name: str,
  mesh: Mesh,
  *,
  config: transformer.ModelConfig,
  page_size: int,
  dtype: DTypeLike,
) -> base.PagedAttention:
  """Picks an implementation; see kernel_choice.choose.

  Args:
    name: config.generator.attention.
    mesh: of the generator.
    config: sizes of the model.
    page_size: token positions of a page.
    dtype: of the KV pool.
  """
  chosen = kernel_choice.choose(
    name,
    mesh,
    makers={
      "xla": xla.XlaAttention,
      "tpu": lambda: tpu.TpuAttention(mesh=mesh),
      "gpu": lambda: gpu.GpuAttention(
        mesh=mesh, prefills_by=gpu.prefills_by(config, dtype)
      ),
    },
    find_obstacle=lambda made: made.find_obstacle(
      config, page_size=page_size, dtype=dtype
    ),
    field="config.generator.attention",
  )
  if isinstance(chosen, gpu.GpuAttention):
    logging.info(
      "Prefill is by %s, as KV pages are %s and heads %d wide.",
      chosen.prefills_by,
      jnp.dtype(dtype).name,
      config.head_width,
    )
  return chosen
