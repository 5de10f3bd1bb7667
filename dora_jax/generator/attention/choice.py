"""Which attention over pages a generator mesh takes."""

from absl import logging
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dora_jax.generator.attention import base, gpu, tpu, xla
from dora_jax.model import transformer

# config.generator.attention; "auto" takes the one for the mesh's devices.
NAMES = ("auto", "xla", "tpu", "gpu")


def choose(
  name: str,
  mesh: Mesh,
  *,
  config: transformer.ModelConfig,
  page_size: int,
  dtype: DTypeLike,
) -> base.PagedAttention:
  """Picks an implementation by name, "auto" by the platform of the mesh.

  Where the platform's kernel cannot serve the model, "auto" takes "xla". What
  it takes is logged, with the reason.

  Args:
    name: of NAMES.
    mesh: of the generator.
    config: sizes of the model.
    page_size: token positions of a page.
    dtype: of the KV pool.

  Raises:
    ValueError: where what is named does not exist or cannot serve the model.
  """
  if name not in NAMES:
    raise ValueError(
      f"config.generator.attention is {name!r} but must be one of {NAMES}."
    )
  platform = mesh.devices.flat[0].platform
  # Some platforms, such as "cpu", have no kernel; some plugins name themselves.
  meant = platform if platform in ("tpu", "gpu") else "xla"
  chosen = _make(meant if name == "auto" else name, mesh)
  obstacle = chosen.find_obstacle(config, page_size=page_size, dtype=dtype)
  if name == "auto":
    reason = f"the devices are {platform}"
    if obstacle is not None:
      reason = f"{chosen.name} cannot serve here: {obstacle}"
      chosen = xla.XlaAttention()
    logging.info("Attention over pages: %s, as %s.", chosen.name, reason)
    return chosen
  if name not in (meant, "xla"):
    obstacle = f"the generator's devices are {platform}"
  if obstacle is not None:
    raise ValueError(
      f"config.generator.attention is {name!r}, but {obstacle}; or set "
      'config.generator.attention to "auto".'
    )
  return chosen


def _make(name: str, mesh: Mesh) -> base.PagedAttention:
  if name == "tpu":
    return tpu.TpuAttention(mesh=mesh)
  if name == "gpu":
    return gpu.GpuAttention(mesh=mesh)
  return xla.XlaAttention()
