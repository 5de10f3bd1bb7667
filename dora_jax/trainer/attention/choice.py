"""Which attention within segments the trainer takes."""

from absl import logging
from jax.sharding import Mesh

from dora_jax.model import transformer
from dora_jax.trainer.attention import base, gpu, tpu, xla

# config.trainer.attention; "auto" takes the one for the mesh's devices.
NAMES = ("auto", "xla", "tpu", "gpu")


def choose(
  name: str, mesh: Mesh, *, config: transformer.ModelConfig, row_length: int
) -> base.SegmentAttention:
  """Picks an implementation by name, "auto" by the platform of the mesh.

  Where the platform's kernel cannot serve, "auto" takes "xla". What it takes is
  logged, with the reason.

  Args:
    name: of NAMES.
    mesh: of the trainer.
    config: sizes of the model.
    row_length: tokens of a row.

  Raises:
    ValueError: where what is named does not exist or cannot serve.
  """
  if name not in NAMES:
    raise ValueError(
      f"config.trainer.attention is {name!r} but must be one of {NAMES}."
    )
  platform = mesh.devices.flat[0].platform
  # Some platforms, such as "cpu", have no kernel; some plugins name themselves.
  meant = platform if platform in ("tpu", "gpu") else "xla"
  chosen = _make(meant if name == "auto" else name, mesh)
  obstacle = chosen.find_obstacle(config, row_length=row_length)
  if name == "auto":
    reason = f"the devices are {platform}"
    if obstacle is not None:
      reason = f"{chosen.name} cannot serve here: {obstacle}"
      chosen = xla.XlaAttention()
    logging.info("Attention of the trainer: %s, as %s.", chosen.name, reason)
    return chosen
  if name not in (meant, "xla"):
    obstacle = f"the trainer's devices are {platform}"
  if obstacle is not None:
    raise ValueError(
      f"config.trainer.attention is {name!r}, but {obstacle}; or set "
      'config.trainer.attention to "auto".'
    )
  return chosen


def _make(name: str, mesh: Mesh) -> base.SegmentAttention:
  if name == "tpu":
    return tpu.TpuAttention(mesh=mesh)
  if name == "gpu":
    return gpu.GpuAttention(mesh=mesh)
  return xla.XlaAttention()
