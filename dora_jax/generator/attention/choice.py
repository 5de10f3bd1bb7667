"""Which attention over pages a generator mesh takes."""

from jax.sharding import Mesh

from dora_jax.generator.attention import base, xla

# config.generator.attention; "auto" takes the one for the mesh's devices.
NAMES = ("auto", "xla")


def choose(name: str, mesh: Mesh) -> base.PagedAttention:
  """Picks an implementation by name, "auto" by the platform of the mesh.

  Args:
    name: of NAMES.
    mesh: of the generator.
  """
  del mesh
  if name not in NAMES:
    raise ValueError(
      f"config.generator.attention is {name!r} but must be one of {NAMES}."
    )
  return xla.XlaAttention()
