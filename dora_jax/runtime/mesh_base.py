"""The frozen base on one generator mesh, and versions made of it."""

from typing import Any

from dora_jax import interfaces
from dora_jax.generator import engine as engine_lib
from dora_jax.model import adapted
from dora_jax.weights import frozen_base


class MeshBase:
  """Puts adapters on the base of a mesh, which is held there once.

  Not for several threads: the one that drives the mesh calls everything.
  """

  def __init__(
    self,
    *,
    base: frozen_base.FrozenBase,
    mesh_id: int,
    engine: engine_lib.Engine,
  ):
    """Takes nothing yet.

    Args:
      base: of all meshes.
      mesh_id: of this one.
      engine: of this one, for which the base is arranged.
    """
    self._base = base
    self._mesh_id = mesh_id
    self._engine = engine
    self._arranged: Any = None

  def whole(self, adapters: interfaces.Params) -> interfaces.Params:
    """All params of a version; those of the base are the same arrays in each.

    Args:
      adapters: of the version, on the mesh.
    """
    if self._arranged is None:
      taken = self._base.take(self._mesh_id)
      self._arranged = self._engine.arrange(taken)
    return adapted.join(
      self._arranged, self._engine.arrange(adapters), scale=self._base.scale
    )

  def discard(self) -> None:
    """Lets go of the base: the mesh will not be used again."""
    self._arranged = None
