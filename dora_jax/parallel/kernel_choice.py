"""Which of several implementations a mesh takes, by its platform."""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, runtime_checkable

from absl import logging
from jax.sharding import Mesh

# "auto" takes the one for the mesh's devices, "xla" serves on any.
NAMES = ("auto", "xla", "tpu", "gpu")


@runtime_checkable
class _Named(Protocol):
  @property
  def name(self) -> str: ...


_Kernel = TypeVar("_Kernel", bound=_Named)


def choose(
  name: str,
  mesh: Mesh,
  *,
  makers: Mapping[str, Callable[[], _Kernel]],
  find_obstacle: Callable[[_Kernel], str | None],
  field: str,
) -> _Kernel:
  """Picks an implementation by name, "auto" by the platform of the mesh.

  Where the platform's kernel cannot serve, "auto" takes "xla". What it takes is
  logged, with the reason.

  Args:
    name: of NAMES.
    mesh: whose devices are to run it.
    makers: of NAMES but "auto" -> makes one; those other than "xla" are named
      after the platform that they are for.
    find_obstacle: says why one cannot serve, as part of a sentence, or None.
    field: of the config, that names it.

  Raises:
    ValueError: where what is named does not exist or cannot serve.
  """
  if name not in NAMES:
    raise ValueError(f"{field} is {name!r} but must be one of {NAMES}.")
  platform = mesh.devices.flat[0].platform
  # Some platforms, such as "cpu", have no kernel; some plugins name themselves.
  meant = platform if platform in makers else "xla"
  chosen = makers[meant if name == "auto" else name]()
  obstacle = find_obstacle(chosen)
  if name == "auto":
    reason = f"the devices are {platform}"
    if obstacle is not None:
      reason = f"{chosen.name} cannot serve here: {obstacle}"
      chosen = makers["xla"]()
    logging.info('%s "auto" is %s, as %s.', field, chosen.name, reason)
    return chosen
  if name not in (meant, "xla"):
    obstacle = f"the devices are {platform}"
  if obstacle is not None:
    raise ValueError(
      f'{field} is {name!r}, but {obstacle}; or set {field} to "auto".'
    )
  return chosen
