"""Which attention within segments the trainer takes."""

from jax.sharding import Mesh

from dora_jax.model import transformer
from dora_jax.parallel import kernel_choice
from dora_jax.trainer.attention import base, gpu, tpu, xla


def choose(
  name: str, mesh: Mesh, *, config: transformer.ModelConfig, row_length: int
) -> base.SegmentAttention:
  """Picks an implementation; see kernel_choice.choose.

  Args:
    name: config.trainer.attention.
    mesh: of the trainer.
    config: sizes of the model.
    row_length: tokens of a row.
  """
  return kernel_choice.choose(
    name,
    mesh,
    makers={
      "xla": lambda: xla.XlaAttention(mesh=mesh),
      "tpu": lambda: tpu.TpuAttention(mesh=mesh),
      "gpu": lambda: gpu.GpuAttention(mesh=mesh),
    },
    find_obstacle=lambda made: made.find_obstacle(
      config, row_length=row_length
    ),
    field="config.trainer.attention",
  )
