"""Sums of gradients are those of micro-batches one by one."""

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


def test_it_gives_what_gradients_one_by_one_give_for_any_number(batches):
  loss, settings, policy, _ = _ARGUMENTS
  _, shardings = train_state.param_layout(policy, _MESH)
  params = jax.device_put(tiny.make_params(), shardings)
  denominator = np.float32(50.0)
  sums: Any = accumulation.Accumulation(*_ARGUMENTS)
  gradient = jax.jit(
    jax.value_and_grad(
      lambda params, batch: loss(params, batch, denominator, settings=settings),
      has_aux=True,
    )
  )

  def find(count):
    total, told = sums.sum(params, None, iter(batches[:count]), denominator)
    total, told = jax.device_get((total, told))
    return total, sums.read(told)

  for count in (3, 4, 1):
    told, parts = zip(
      *(gradient(params, batch) for batch in batches[:count]), strict=True
    )
    expected = jax.tree.map(lambda *each: sum(each), *parts)
    found = find(count)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
      found,
      (expected, [accumulation.Told(*each) for each in told]),
    )
    jax.tree.map(np.testing.assert_array_equal, find(count), found)
  # Of 3 and 4 it is one program.
  assert sums._scan._cache_size() == 2


def test_it_holds_the_activations_of_one_micro_batch():
  zeros: Any = accumulation.make_zeros(tiny.POLICY, _MESH)
  params = jax.eval_shape(zeros)
  scan: Any = accumulation.make_scan(*_ARGUMENTS)

  def temporaries(room):
    batches = {
      name: jax.ShapeDtypeStruct((room, 2, 512), dtype)
      for name, dtype in device_batch.FIELDS.items()
    }
    count, denominator = np.int32(room), np.float32(1.0)
    lowered = scan.lower(params, None, params, batches, count, denominator)
    return lowered.compile().memory_analysis().temp_size_in_bytes

  one, many = temporaries(1), temporaries(16)
  print(f"{one / 2**20:.2f} and {many / 2**20:.2f} MiB")
  assert many < 1.1 * one
