"""The sum of the gradients of a step's micro-batches, by one program.

It holds the activations of one micro-batch and one sum of gradients at a time.
A program for each micro-batch would take memory from the system every time: on
2 CPU cores, float32, that took 1.2 times as long (8 layers of width 512, 29M;
4 of width 128), and less only where micro-batches had 512 tokens of width 64.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax import interfaces
from dora_jax.parallel import axes
from dora_jax.trainer import device_batch, gradients, train_state
from dora_jax.trainer import trained as trained_lib


class Told(NamedTuple):
  """What the loss tells of a micro-batch.

  Attributes:
    loss: its part of the step's.
    stats: whatever else; see gradients.Loss.
  """

  loss: Any
  stats: Any


class Accumulation:
  """Sums gradients.

  It is compiled for powers of two of micro-batches, so that a run in which
  their number changes from step to step has few programs. Of those beyond the
  step's number none is computed.
  """

  def __init__(
    self,
    loss: gradients.Loss,
    settings: gradients.LossSettings,
    trained: trained_lib.Trained,
    mesh: jax.sharding.Mesh,
  ):
    """Compiles at the first use of each power of two."""
    self._zeros = make_zeros(trained, mesh)
    self._stack = make_stack(mesh)
    self._scan = make_scan(loss, settings, trained, mesh)

  def sum(
    self,
    params: interfaces.Params,
    frozen: interfaces.Params | None,
    batches: Iterable[device_batch.DeviceBatch],
    denominator: np.float32,
  ) -> tuple[interfaces.Params, Any]:
    """Sums the gradients of micro-batches, without waiting for devices.

    Args:
      params: that are trained.
      frozen: what the forward pass takes besides.
      batches: of one shape, at least one; asked for one after the other.
      denominator: of the whole step.

    Returns:
      The sum, float32 and sharded as the params, and what `read` takes.
    """
    batches = list(batches)
    count = len(batches)
    room = 1 << (count - 1).bit_length()
    stacked = self._stack(batches + batches[-1:] * (room - count))
    total, told = self._scan(
      params, frozen, self._zeros(), stacked, np.int32(count), denominator
    )
    return total, (count, told)

  def read(self, told: tuple[int, Told]) -> list[Told]:
    """What the loss tells of each micro-batch, from what is on the host."""
    count, stacked = told
    take = lambda index: jax.tree.map(lambda stack: stack[index], stacked)
    return [take(index) for index in range(count)]


@functools.lru_cache
def make_zeros(
  trained: trained_lib.Trained, mesh: jax.sharding.Mesh
) -> Callable:
  """Jits () -> a sum of no gradients."""
  shapes, shardings = train_state.param_layout(trained, mesh)

  def zeros():
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  return jax.jit(zeros, out_shardings=shardings)


@functools.lru_cache
def make_stack(mesh: jax.sharding.Mesh) -> Callable:
  """Jits a sequence of micro-batches -> one with a leading axis."""

  def stack(batches: Sequence[device_batch.DeviceBatch]):
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *batches)

  return jax.jit(stack, out_shardings=stacked_sharding(mesh))


def stacked_sharding(mesh: jax.sharding.Mesh) -> jax.NamedSharding:
  """Of micro-batches with a leading axis, each laid out as it was alone."""
  rows = axes.partition_spec(("row", "token"), axes.TRAIN)
  return jax.NamedSharding(mesh, jax.P(None, *rows))


@functools.lru_cache
def make_scan(
  loss: gradients.Loss,
  settings: gradients.LossSettings,
  trained: trained_lib.Trained,
  mesh: jax.sharding.Mesh,
) -> Callable:
  """Jits (params, frozen, sum, batches, count, denominator) -> (sum, Told).

  It adds the first `count` of the stacked micro-batches. What is told has a
  leading axis too; past the count it is 0. The sum is donated.
  """
  gradient = _make_gradient(loss, settings, trained)

  def scan(params, frozen, total, batches, count, denominator):
    def add(index, carry):
      total, told = carry
      each, new = gradient(params, frozen, _take(batches, index), denominator)
      put = lambda all_of, one: jax.lax.dynamic_update_index_in_dim(
        all_of, one, index, axis=0
      )
      total = jax.tree.map(jnp.add, total, new)
      return total, jax.tree.map(put, told, each)

    each, _ = jax.eval_shape(
      gradient, params, frozen, _take(batches, 0), denominator
    )
    room = jax.tree.leaves(batches)[0].shape[0]
    told = jax.tree.map(lambda x: jnp.zeros((room, *x.shape), x.dtype), each)
    return jax.lax.fori_loop(0, count, add, (total, told))

  return jax.jit(scan, donate_argnums=2, out_shardings=_layout(trained, mesh))


def _make_gradient(loss, settings, trained) -> Callable:
  """(params, frozen, batch, denominator) -> (Told, gradients)."""

  def loss_of(params, frozen, batch, denominator):
    whole = trained.whole(params, frozen)
    return loss(whole, batch, denominator, settings=settings)

  def gradient(*arguments):
    value, new = jax.value_and_grad(loss_of, has_aux=True)(*arguments)
    return Told(*value), new

  return gradient


def _layout(trained, mesh):
  """Shardings of a sum of gradients, and of what is told.

  That is small; replicated, every host can read it whole.
  """
  _, shardings = train_state.param_layout(trained, mesh)
  return shardings, jax.NamedSharding(mesh, jax.P())


def _take(batches, index):
  """One of the stacked micro-batches."""
  return jax.tree.map(
    lambda stack: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False),
    batches,
  )
