"""Gradients: the same for every layout, and without logits of whole rows."""

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
  trained,
)
from dora_jax.trainer.attention import xla
from tests.trainer import tiny


def _settings(mesh, **changes):
  (hidden,) = axes.shardings([("row", "token", "norm")], mesh, axes.TRAIN)
  return gradients.LossSettings(
    **(
      {
        "config": tiny.CONFIG,
        "objective": tiny.OBJECTIVE,
        "temperature": 1.0,
        "attention": xla.XlaAttention(mesh=mesh),
        "compute_dtype": jnp.float32,
        "logprob_chunk": 8,
        "remat": False,
        "unrolls": False,
        "hidden_sharding": hidden,
      }
      | changes
    )
  )


def _gradient(mesh, *, row_length=24, rows_per_batch=8, **changes):
  """Of a step over as many micro-batches as it takes."""
  batches = tiny.pack(
    tiny.make_groups(), row_length=row_length, rows_per_batch=rows_per_batch
  )
  policy = trained.Policy(tiny.CONFIG)
  sums = accumulation.Accumulation(
    gradients.policy_loss, _settings(mesh, **changes), policy, mesh
  )
  (rows,) = axes.shardings([("row", "token")], mesh, axes.TRAIN)
  _, shardings = train_state.param_layout(policy, mesh)
  params = jax.device_put(tiny.make_params(), shardings)
  arrays = [device_batch.put(batch, rows) for batch in batches]
  total, told = sums.sum(params, None, arrays, np.float32(50.0))
  assert len(sums.read(jax.device_get(told))) == len(batches)
  return total


@pytest.fixture(scope="module")
def reference():
  return jax.device_get(_gradient(tiny.make_mesh()))


@pytest.mark.parametrize(
  "mesh, changes",
  [
    ((1, 1, 1), {"rows_per_batch": 1}),
    ((1, 1, 1), {"unrolls": True}),
    ((8, 1, 1), {}),
    ((1, 2, 1), {"rows_per_batch": 1}),
    ((1, 4, 2), {"remat": True}),
    ((4, 1, 2), {"row_length": 40, "rows_per_batch": 4, "unrolls": True}),
    ((2, 2, 2), {"row_length": 40, "rows_per_batch": 4, "unrolls": True}),
    pytest.param((1, 1, 1), {"row_length": 60}, marks=pytest.mark.slow),
    pytest.param((2, 1, 1), {}, marks=pytest.mark.slow),
    pytest.param((1, 1, 2), {}, marks=pytest.mark.slow),
    pytest.param((4, 1, 1), {}, marks=pytest.mark.slow),
    pytest.param((2, 1, 2), {}, marks=pytest.mark.slow),
    pytest.param((2, 2, 1), {}, marks=pytest.mark.slow),
    pytest.param((1, 8, 1), {}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_gradient_is_the_same_for_every_layout(reference, mesh, changes):
  found = _gradient(tiny.make_mesh(*mesh), **changes)

  def check(path, one, two):
    error = np.linalg.norm(one - two) / np.linalg.norm(two)
    assert error <= 1e-5, (jax.tree_util.keystr(path), error)

  jax.tree_util.tree_map_with_path(check, jax.device_get(found), reference)


def test_gradients_of_bfloat16_compute_are_summed_in_float32():
  """Weights' gradients keep digits that bfloat16 has not."""
  batch = {
    name: jnp.asarray(getattr(batch, name))
    for batch in tiny.pack(tiny.make_groups(), row_length=24, rows_per_batch=8)
    for name in device_batch.FIELDS
  }
  settings = _settings(tiny.make_mesh(), compute_dtype=jnp.bfloat16)
  grads = jax.jit(
    lambda params: jax.grad(gradients.policy_loss, has_aux=True)(
      params, batch, 50.0, settings=settings
    )[0]
  )(tiny.make_params())
  blocks = grads["blocks"]
  for name in ("query", "output", "gate", "down", "mlp_norm"):
    values = np.asarray(blocks[name])
    assert values.dtype == np.float32
    assert (values != values.astype(jnp.bfloat16).astype(np.float32)).any()


def test_logits_of_whole_rows_are_not_in_the_compiled_program():
  """Temporaries of the gradient, and of the loss, for a large vocabulary."""
  config = dataclasses.replace(tiny.CONFIG, vocab_size=151936)
  num_rows, row_length = 2, 512
  mesh = tiny.make_mesh()
  settings = _settings(mesh, config=config, logprob_chunk=16)
  params = jax.eval_shape(accumulation.make_zeros(trained.Policy(config), mesh))
  batch = {
    name: jax.ShapeDtypeStruct((num_rows, row_length), dtype)
    for name, dtype in device_batch.FIELDS.items()
  }

  def loss(params, batch):
    return gradients.policy_loss(params, batch, 50.0, settings=settings)[0]

  whole_bytes = 4 * num_rows * row_length * config.vocab_size
  for function in (loss, jax.grad(loss)):
    compiled = jax.jit(function).lower(params, batch).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    found = memory.temp_size_in_bytes
    print(f"{found / 2**20:.0f} of {whole_bytes / 2**20:.0f} MiB")
    assert found < 0.2 * whole_bytes


def test_a_device_keeps_less_of_a_row_that_several_share():
  """Temporaries of the gradient where weights are small beside activations."""
  config = dataclasses.replace(tiny.CONFIG, num_layers=2)
  policy = trained.Policy(config)

  def temporaries(mesh):
    settings = _settings(mesh, config=config, logprob_chunk=256)
    rows = accumulation.stacked_sharding(mesh)
    batches = {
      name: jax.ShapeDtypeStruct((1, 1, 4096), dtype, sharding=rows)
      for name, dtype in device_batch.FIELDS.items()
    }
    params = jax.eval_shape(accumulation.make_zeros(policy, mesh))
    # A jitted function, whatever a type checker makes of its cache.
    accumulate: Any = accumulation.make_scan(
      gradients.policy_loss, settings, policy, mesh
    )
    lowered = accumulate.lower(
      params, None, params, batches, np.int32(1), np.float32(50.0)
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes

  whole, shared = (
    temporaries(tiny.make_mesh()),
    temporaries(tiny.make_mesh(1, 4)),
  )
  print(f"{whole / 2**20:.2f} and {shared / 2**20:.2f} MiB")
  assert shared < 0.35 * whole
