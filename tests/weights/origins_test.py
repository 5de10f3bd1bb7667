import dataclasses

import jax
import pytest

from dora_jax.weights import origins


@dataclasses.dataclass(frozen=True)
class Device:
  id: int
  process_index: int


def copy_of(kind, *ids, process=0):
  devices = frozenset(Device(i, process) for i in ids)
  return origins.Origin(kind=kind, devices=devices, params=(kind, *ids))


@pytest.mark.parametrize(
  ("candidates", "wanted"),
  [
    ([copy_of("trainer", 0, 1)], ("trainer", 0, 1)),
    ([copy_of("host")], ("host",)),
    # A peer goes before the trainer, however far it is.
    (
      [copy_of("trainer", 8, 9), copy_of("peer", 40, 41)],
      ("peer", 40, 41),
    ),
    # The nearest of the peers; the target is 10 and 11.
    (
      [copy_of("peer", 4, 5), copy_of("peer", 14, 15), copy_of("peer", 20)],
      ("peer", 14, 15),
    ),
    # As near on both sides: the lower id, in whatever order they come.
    ([copy_of("peer", 12, 13), copy_of("peer", 8, 9)], ("peer", 8, 9)),
    # The own process goes before a peer, and before what is nearer.
    (
      [copy_of("peer", 12, 13, process=1), copy_of("trainer", 0, 1)],
      ("trainer", 0, 1),
    ),
    (
      [copy_of("peer", 12, 13, process=1), copy_of("peer", 0, 1)],
      ("peer", 0, 1),
    ),
    # The host is the last resort.
    ([copy_of("host"), copy_of("trainer", 0)], ("trainer", 0)),
    (
      [copy_of("host"), copy_of("trainer", 0, process=1)],
      ("trainer", 0),
    ),
  ],
)
def test_the_nearest_copy_by_table(candidates, wanted):
  target = [Device(11, 0), Device(10, 0)]
  assert origins.nearest(candidates, target).params == wanted
  assert origins.nearest(candidates[::-1], target).params == wanted


def test_no_copy_is_named():
  with pytest.raises(ValueError, match=r"no copy .* devices \[3\]"):
    origins.nearest([], [jax.devices()[3]])
