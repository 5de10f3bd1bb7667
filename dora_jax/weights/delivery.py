"""Brings a version to a mesh: from the nearest copy, and from another at need.

What arrives is checked by its checksums. A delivery that fails is tried once
more, from the next copy where there is one: a peer may just have died.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import logging

from dora_jax.weights import origins as origins_lib
from dora_jax.weights import reshard

_NUM_TRIES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivery:
  """Params that have arrived.

  Attributes:
    params: on their target shardings.
    origin: the copy that they were taken from.
    num_failed: tries before, which failed.
  """

  params: Any
  origin: origins_lib.Origin
  num_failed: int


def deliver(
  what: str,
  origins: Sequence[origins_lib.Origin],
  shardings: Any,
  *,
  checksums: Mapping[str, int],
) -> Delivery:
  """Copies params to a mesh.

  Args:
    what: they are, for messages, such as "Version 3".
    origins: their copies; `origins.nearest` picks the one to begin with.
    shardings: on the mesh, one for each array.
    checksums: of what was published.

  Raises:
    reshard.Damaged: the last try has brought other bits.
    jax.errors.JaxRuntimeError: a device has failed in the last try.
  """
  left = list(origins)
  for num_failed in range(_NUM_TRIES):
    origin = origins_lib.nearest(left, devices_of(shardings))
    try:
      params = reshard.reshard(origin.params, shardings)
      reshard.check_equal(checksums, reshard.checksums(params))
    except (reshard.Damaged, jax.errors.JaxRuntimeError) as error:
      if num_failed + 1 == _NUM_TRIES:
        raise
      if len(left) > 1:
        left = [each for each in left if each is not origin]
      logging.warning(
        "%s did not arrive from the %s's copy, and is sent again: %s",
        what,
        origin.kind,
        error,
      )
    else:
      return Delivery(params=params, origin=origin, num_failed=num_failed)
  raise AssertionError("the last try returns or raises")


def devices_of(shardings: Any) -> frozenset[origins_lib.Device]:
  """All devices of these shardings."""
  sets = [sharding.device_set for sharding in jax.tree.leaves(shardings)]
  return frozenset().union(*sets)
