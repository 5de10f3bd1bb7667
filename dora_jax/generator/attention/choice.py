"""Which attention over pages a generator mesh takes."""

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
  return kernel_choice.choose(
    name,
    mesh,
    makers={
      "xla": xla.XlaAttention,
      "tpu": lambda: tpu.TpuAttention(mesh=mesh),
      "gpu": lambda: gpu.GpuAttention(mesh=mesh),
    },
    find_obstacle=lambda made: made.find_obstacle(
      config, page_size=page_size, dtype=dtype
    ),
    field="config.generator.attention",
  )
