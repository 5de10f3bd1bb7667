"""One scan of a step's micro-batches gives what dispatches of each give."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.parallel import axes
from dora_jax.trainer import (
  accumulation,
  device_batch,
  gradients,
  train_state,
)
from dora_jax.trainer.attention import xla
from tests.trainer import tiny

_MESH = tiny.make_mesh()
(_ROWS,) = axes.shardings([("row", "token")], _MESH, axes.TRAIN)
_ARGUMENTS = (
  gradients.policy_loss,
  gradients.LossSettings(
    config=tiny.CONFIG,
    objective=tiny.OBJECTIVE,
    temperature=1.0,
    attention=xla.XlaAttention(mesh=_MESH),
    compute_dtype=jnp.float32,
    logprob_chunk=8,
    remat=False,
    unrolls=False,
    hidden_sharding=None,
  ),
  tiny.POLICY,
  _MESH,
)


@pytest.fixture(scope="module")
def batches():
  """Of one row each."""
  packed = tiny.pack(tiny.make_groups(), row_length=24, rows_per_batch=1)
  return [device_batch.put(batch, _ROWS) for batch in packed]


def _sum(ways, batches):
  """The sum, and what is told of each micro-batch, on the host."""
  _, shardings = train_state.param_layout(tiny.POLICY, _MESH)
  params = jax.device_put(tiny.make_params(), shardings)
  total, told = ways.sum(params, None, iter(batches), np.float32(50.0))
  total, told = jax.device_get((total, told))
  return total, ways.read(told)


def test_a_scan_gives_what_dispatches_give_for_any_number(batches):
  ways: list[Any] = [
    accumulation.Dispatches(*_ARGUMENTS),
    accumulation.Scan(*_ARGUMENTS),
  ]
  for count in (3, 4, 1):
    expected, found = (_sum(way, batches[:count]) for way in ways)
    assert len(found[1]) == count
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
      found,
      expected,
    )
    again = _sum(ways[1], batches[:count])
    jax.tree.map(np.testing.assert_array_equal, again, found)
  # Of 3 and 4 it is one program.
  assert ways[1]._scan._cache_size() == 2


def test_a_scan_holds_the_activations_of_one_micro_batch():
  zeros: Any = accumulation.make_zeros(tiny.POLICY, _MESH)
  params = jax.eval_shape(zeros)
  row = (2, 512)
  shapes = lambda *lead: {
    name: jax.ShapeDtypeStruct((*lead, *row), dtype)
    for name, dtype in device_batch.FIELDS.items()
  }
  add: Any = accumulation.make_add(*_ARGUMENTS)
  scan: Any = accumulation.make_scan(*_ARGUMENTS)
  one = add.lower(params, None, params, shapes(), np.float32(1.0))
  many = scan.lower(
    params, None, params, shapes(16), np.int32(16), np.float32(1.0)
  )
  found = [
    x.compile().memory_analysis().temp_size_in_bytes for x in (one, many)
  ]
  print(f"{found[0] / 2**20:.2f} and {found[1] / 2**20:.2f} MiB")
  assert found[1] < 1.1 * found[0]


def test_layers_that_are_compiled_one_by_one_are_dispatched():
  loss, settings, policy, mesh = _ARGUMENTS
  unrolled = dataclasses.replace(settings, unrolls=True)
  dispatched = accumulation.choose(loss, unrolled, policy, mesh)
  assert isinstance(dispatched, accumulation.Dispatches)
  assert isinstance(accumulation.choose(*_ARGUMENTS), accumulation.Scan)
