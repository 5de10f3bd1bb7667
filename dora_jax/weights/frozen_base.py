"""What no version changes: once on each generator mesh, for all versions.

Where adapters are trained and published alone, the params under them are frozen
for a whole run. The store then holds adapters, and this the rest.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dora_jax.weights import delivery, origins, reshard


class FrozenBase:
  """The base on its way to each mesh.

  Attributes:
    scale: of the adapters that versions are.
    num_bytes: of one whole copy; None until it is placed.
  """

  num_bytes: int | None

  def __init__(
    self,
    *,
    shardings: Mapping[int, Any],
    dtype: jax.typing.DTypeLike,
    convert: Callable[[Any], Any],
    scale: float,
  ):
    """Holds nothing yet.

    Args:
      shardings: generator mesh -> the base's shardings on it.
      dtype: what generators compute in.
      convert: gives a cast base the form that generators take.
      scale: of the adapters that will be put on it.
    """
    self.scale = scale
    self._shardings = dict(shardings)
    self._dtype = jnp.dtype(dtype)
    self._convert = convert
    self._placed: dict[int, Any] = {}
    self.num_bytes = None

  def place(self, params: Any) -> None:
    """Copies the base to all meshes, checked by its checksums.

    No mesh may be at work, for all are driven by the thread that calls.

    Args:
      params: as the trainer holds them, whose own they stay.

    Raises:
      RuntimeError: it is placed already: versions would change their base.
      reshard.Damaged: what has arrived is not what was sent, twice.
    """
    if self.num_bytes is not None:
      raise RuntimeError(
        "The frozen base is on the generator meshes already, and versions are "
        "made of it: place it once, before the first version."
      )
    source = self._convert(reshard.cast(params, dtype=self._dtype))
    trainers = origins.Origin(
      kind="trainer",
      devices=delivery.devices_of(
        [leaf.sharding for leaf in jax.tree.leaves(source)]
      ),
      params=source,
    )
    checksums = reshard.checksums(source)
    for mesh_id, shardings in self._shardings.items():
      self._placed[mesh_id] = delivery.deliver(
        "The frozen base", [trainers], shardings, checksums=checksums
      ).params
    self.num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(source))

  def take(self, mesh_id: int) -> Any:
    """Hands the base on a mesh to who serves there, once; keeps none.

    Raises:
      RuntimeError: it is not there: not placed yet, or taken before.
    """
    if mesh_id not in self._placed:
      raise RuntimeError(
        f"The frozen base is not on generator mesh {mesh_id}: place it before "
        "the first version is served, and take it once."
      )
    return self._placed.pop(mesh_id)
