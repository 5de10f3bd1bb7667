"""A micro-batch on the trainer's devices."""

from collections.abc import Mapping
from typing import TypeVar

import jax
import numpy as np

from dora_jax import types

# Fields of a PackedBatch that the loss reads; the rest stays on the host.
FIELDS = {
  "tokens": np.int32,
  "positions": np.int32,
  "segment_ids": np.int32,
  "loss_mask": np.float32,
  "advantages": np.float32,
  "behavior_logprobs": np.float32,
  "lags": np.int32,
}

DeviceBatch = Mapping[str, jax.Array]
_Arrays = TypeVar("_Arrays")


def put(
  batch: types.PackedBatch, sharding: jax.sharding.Sharding
) -> dict[str, jax.Array]:
  """Places what the loss reads of a micro-batch on the devices.

  An objective may need "recomputed_logprobs" and "ref_logprobs" besides.
  """
  arrays = {field: getattr(batch, field) for field in FIELDS}
  return jax.device_put(arrays, sharding)


def gather_rows(
  arrays: _Arrays, hidden_sharding: jax.sharding.Sharding | None
) -> _Arrays:
  """Gives each device its rows whole, where they are split over devices.

  What runs along a row, such as sums over segments, would send something from
  device to device for each token. [B, T] arrays are small enough to have whole.

  Args:
    arrays: a tree of [B, T] arrays.
    hidden_sharding: of the residual stream [B, T, D]; None splits nothing.
  """
  if hidden_sharding is None:
    return arrays
  assert isinstance(hidden_sharding, jax.NamedSharding)
  rows = jax.P(hidden_sharding.spec[0])
  return jax.lax.with_sharding_constraint(
    arrays, jax.NamedSharding(hidden_sharding.mesh, rows)
  )
