"""Params from one layout to another, checked before and after they move.

A move is planned leaf by leaf (name, shape, dtype, source, target); a plan that
does not fit raises before any byte moves. Afterwards the receiver's checksums
are compared with the sender's.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Moved together, so that a large model is never in flight whole.
_BUCKET_BYTES = 256 * 2**20


class Damaged(ValueError):
  """What has arrived is not what was sent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafMove:
  """One array's way from one sharding to another.

  Attributes:
    name: path of the array in the params.
    shape: its shape, which stays.
    dtype: its dtype, which stays; casts happen on the source side before.
    source: the sharding that it has; None in host memory.
    target: the sharding that it gets.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  source: jax.sharding.Sharding | None
  target: jax.sharding.Sharding

  @property
  def num_bytes(self) -> int:
    """Bytes of the whole array."""
    return int(np.prod(self.shape)) * self.dtype.itemsize


def _named_leaves(tree: Any) -> dict[str, Any]:
  return {
    jax.tree_util.keystr(path): leaf
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def plan(params: Any, target_shardings: Any) -> list[LeafMove]:
  """Pairs each array with its target; moves nothing.

  Raises:
    ValueError: names differ, or a shape does not divide over its target; the
      message names the array.
  """
  sources = _named_leaves(params)
  targets = _named_leaves(target_shardings)
  if sources.keys() != targets.keys():
    raise ValueError(
      "The params that are sent and those that are expected differ: only sent "
      f"{sorted(sources.keys() - targets.keys())}, only expected "
      f"{sorted(targets.keys() - sources.keys())}."
    )
  moves = []
  for name, leaf in sources.items():
    try:
      targets[name].shard_shape(leaf.shape)
    except ValueError as error:
      raise ValueError(
        f"params{name} of shape {leaf.shape} does not fit its target "
        f"{targets[name]}: {error}"
      ) from error
    moves.append(
      LeafMove(
        name=name,
        shape=leaf.shape,
        dtype=np.dtype(leaf.dtype),
        source=leaf.sharding if isinstance(leaf, jax.Array) else None,
        target=targets[name],
      )
    )
  return moves


def reshard(params: Any, target_shardings: Any) -> Any:
  """Copies params to their target shardings, in buckets.

  It reads the params and leaves them as they are. Between meshes without a
  device in common no program spans devices, so any thread may call it that
  drives the target's mesh, whatever runs on the source's.

  Args:
    params: arrays on devices, or in host memory as `to_host` makes them.
    target_shardings: one for each array.

  Raises:
    ValueError: as `plan`.
  """
  moves = plan(params, target_shardings)
  leaves, structure = jax.tree.flatten(params)
  moved: list[Any] = []
  start = 0
  while start < len(moves):
    end, num_bytes = start, 0
    while end < len(moves) and (
      end == start or num_bytes + moves[end].num_bytes <= _BUCKET_BYTES
    ):
      num_bytes += moves[end].num_bytes
      end += 1
    bucket = jax.device_put(
      leaves[start:end], [move.target for move in moves[start:end]]
    )
    if end < len(moves):
      jax.block_until_ready(bucket)
    moved += bucket
    start = end
  return jax.tree.unflatten(structure, moved)


def to_host(leaf: jax.Array) -> np.ndarray:
  """Copies one whole array to host memory of its own, to be read only."""
  copy = np.asarray(leaf)
  # A CPU's arrays are looked into, not copied: such a view would keep alive
  # the buffer that is to be freed.
  if any(device.platform == "cpu" for device in leaf.devices()):
    copy = copy.copy()
  copy.flags.writeable = False
  return copy


@jax.jit(static_argnames="dtype")
def cast(params: Any, *, dtype: jax.typing.DTypeLike) -> Any:
  """Copies params in another dtype, in the layout that they have.

  It is a copy even where the dtype stays: the trainer donates its own params to
  the next step, which must not take a published version with it.
  """
  return jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), params)


def _checksum(leaf: jax.Array) -> jax.Array:
  bits = jax.lax.bitcast_convert_type(
    leaf, jnp.dtype(f"uint{leaf.dtype.itemsize * 8}")
  ).astype(jnp.uint32)
  # Each place has an odd weight of its own, so that values which swap places
  # change the sum; integer sums do not depend on the order of the shards.
  index = jnp.zeros(leaf.shape, jnp.uint32)
  for axis, size in enumerate(leaf.shape):
    index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(
      jnp.uint32, leaf.shape, axis
    )
  weights = index * jnp.uint32(2) + jnp.uint32(1)
  # Large primes mix the low bits of short floats, mostly zero, into the sum.
  mixed = (bits ^ (bits >> jnp.uint32(15))) * jnp.uint32(0x9E3779B1)
  return jnp.sum(mixed * weights, dtype=jnp.uint32)


@jax.jit
def _checksums(params: Any) -> jax.Array:
  return jnp.stack([_checksum(leaf) for leaf in jax.tree.leaves(params)])


def checksums(params: Any) -> dict[str, int]:
  """Computes one number for each array's bits and their places.

  The number does not depend on the sharding. Runs on the devices of the params.
  """
  return dict(
    zip(
      _named_leaves(params),
      np.asarray(_checksums(params)).tolist(),
      strict=True,
    )
  )


def check_equal(sent: Mapping[str, int], received: Mapping[str, int]) -> None:
  """Raises Damaged where the receiver's checksums are not the sender's."""
  wrong = [name for name in sent if received.get(name) != sent[name]]
  if wrong or sent.keys() != received.keys():
    raise Damaged(
      f"Weights arrived changed: the checksums of {wrong[:5]} differ "
      f"({len(wrong)} of {len(sent)} arrays)."
    )
