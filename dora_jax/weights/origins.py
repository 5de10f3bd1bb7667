"""Which of a version's copies is the nearest to where one is wanted."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, Protocol, runtime_checkable


@runtime_checkable
class Device(Protocol):
  """What has to be known of a device; jax.Device is one."""

  @property
  def id(self) -> int:
    """Unique in the run; near ids are near each other."""
    ...

  @property
  def process_index(self) -> int:
    """The process that drives it."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
  """A copy of a version's params, from which another can be made.

  Attributes:
    kind: whose it is: the trainer's, a generator mesh's, or the host's.
    devices: where it is; none for the host's.
    params: the copy.
  """

  kind: Literal["trainer", "peer", "host"]
  devices: frozenset[Device]
  params: Any


def nearest(
  origins: Iterable[Origin], target_devices: Iterable[Device]
) -> Origin:
  """Picks the copy to take a version from.

  The host's comes last: it may have to cross the slowest link. Before it comes
  who is in the target's processes; then a peer before the trainer, whose links
  stay free for training; then the least |i - j|, where i and j are the least
  device ids of copy and target; and of two as near, the one with the lesser i.

  Raises:
    ValueError: there is no copy.
  """
  targets = list(target_devices)
  target_id, target_processes = _lowest_id(targets), _processes(targets)

  def cost(origin: Origin) -> tuple[bool, bool, bool, int, int]:
    if origin.kind == "host":
      return (True, False, False, 0, 0)
    lowest_id = _lowest_id(origin.devices)
    return (
      False,
      _processes(origin.devices) != target_processes,
      origin.kind == "trainer",
      # A mesh is a run of neighbours: its first device stands for all, which
      # orders meshes of one size as any pairing of their devices would.
      abs(lowest_id - target_id),
      lowest_id,
    )

  found = min(origins, key=cost, default=None)
  if found is None:
    raise ValueError(
      f"There is no copy of the params from which devices "
      f"{sorted(device.id for device in targets)} could take theirs."
    )
  return found


def _lowest_id(devices: Iterable[Device]) -> int:
  return min(device.id for device in devices)


def _processes(devices: Iterable[Device]) -> set[int]:
  return {device.process_index for device in devices}
