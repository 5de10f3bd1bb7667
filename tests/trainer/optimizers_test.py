"""Schedules and optimizers: by hand, and each laid out over eight devices."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest

from dora_jax import checkpoint
from dora_jax.model import transformer
from dora_jax.trainer import gradients, optimizers, train_state, trained
from tests.trainer import tiny


def _settings(**changes):
  return dataclasses.replace(tiny.OPTIMIZER, **changes)


@pytest.mark.parametrize(
  "kind, falling",
  # Four steps down; the cosine is (1 + cos(pi n / 4)) / 2.
  [
    ("cosine", [(1 + np.sqrt(0.5)) / 2, 0.5, (1 - np.sqrt(0.5)) / 2, 0.0]),
    ("linear", [0.75, 0.5, 0.25, 0.0]),
    ("constant", [1.0, 1.0, 1.0, 1.0]),
  ],
)
def test_schedules_by_hand(kind, falling):
  settings = _settings(lr=1.0, warmup_steps=3, total_steps=7, schedule=kind)
  schedule = optimizers.make_schedule(settings)
  found = [np.asarray(schedule(step)) for step in range(8)]
  expected = [0.25, 0.5, 0.75, 1.0, *falling]
  np.testing.assert_allclose(found, expected, atol=1e-6)


def _first_update(settings, params: Any, gradients: Any) -> Any:
  optimizer = optimizers.make_optimizer(settings, tiny.POLICY)
  return optimizer.update(gradients, optimizer.init(params), params)[0]


def test_adamw_first_moves_by_the_learning_rate_times_the_sign():
  # Adam's first step is lr * g / (|g| + eps), weight decay adds lr * decay * p.
  settings = _settings(lr=0.5, eps=1e-12, weight_decay=0.1, clip_norm=1e-3)
  params = {"w": np.array([2.0, -4.0], np.float32)}
  updates = _first_update(
    settings, params, {"w": np.array([3.0, -5.0], np.float32)}
  )
  np.testing.assert_allclose(updates["w"], [-0.5 - 0.1, 0.5 + 0.2], rtol=1e-5)


def test_adafactor_by_hand():
  # Its first moment estimate is the squared gradient alone. That of rows times
  # that of columns over the mean is exact where the gradient is a product.
  settings = _settings(
    kind="adafactor", lr=0.5, weight_decay=0.1, clip_norm=np.inf
  )
  rng = np.random.default_rng(0)
  rows, columns = rng.normal(size=(128, 1)), rng.normal(size=(1, 130))
  product = (rows * columns).astype(np.float32)
  params = {"w": np.full((128, 130), 2.0, np.float32)}
  updates = _first_update(settings, params, {"w": product})
  expected = -0.5 * (np.sign(product) + 0.1 * 2.0)
  np.testing.assert_allclose(updates["w"], expected, rtol=1e-4)
  # One entry of four: 2 / sqrt(4 * 4 / 4) here, but the root mean square of an


def test_muon_makes_each_layers_matrix_orthogonal():
  config = dataclasses.replace(tiny.CONFIG, num_layers=2)
  settings = _settings(kind="muon", lr=0.5, clip_norm=np.inf)
  policy = trained.Policy(config)
  params = transformer.init_params(config, key=jax.random.key(0))
  noise: Any = transformer.init_params(config, key=jax.random.key(1))
  optimizer = optimizers.make_optimizer(settings, policy)
  updates: Any = jax.jit(
    lambda g, p: optimizer.update(g, optimizer.init(p), p)[0]
  )(noise, params)
  alone = optax.contrib.muon(0.5, eps=settings.eps, consistent_rms=0.2)
  # Of [L, K, G, H, D], the heads' outputs are summed over.
  for name, summed in (("output", 32), ("query", 32), ("down", 64)):
    for layer in range(2):
      matrix = {"w": noise["blocks"][name][layer].reshape(summed, -1)}
      with jax.numpy_dtype_promotion("standard"):
        expected: Any = alone.update(matrix, alone.init(matrix), matrix)[0]
      found = updates["blocks"][name][layer].reshape(summed, -1)
      np.testing.assert_allclose(found, expected["w"], atol=1e-5)
      # Of a product's output, no direction is favored: U and V of the
      # singular value decomposition, as far as five iterations go.
      scale = 0.5 * 0.2 * np.sqrt(max(found.shape))
      values = np.linalg.svd(np.asarray(found) / scale, compute_uv=False)
      assert values.min() > 0.6 and values.max() < 1.3
  # Not a matrix: AdamW with Nesterov's momentum. Its first step is nearly the
  # sign times b1 (1 - b1) / (1 - b1^2) + 1.
  sizes = updates["embed"] / (-0.5 * np.sign(noise["embed"]))
  np.testing.assert_allclose(np.median(sizes), 1 + 0.09 / 0.19, atol=0.05)


# Wide enough for Adafactor to keep rows and columns.
_WIDE = trained.Policy(
  dataclasses.replace(tiny.CONFIG, width=128, mlp_width=256)
)


@pytest.mark.parametrize(
  # Muon's iterations take long to compile.
  "kind",
  ["adafactor", pytest.param("muon", marks=pytest.mark.slow)],
)
def test_state_is_sharded_as_its_params_and_comes_back(kind, tmp_path):
  settings = _settings(kind=kind, average_decay=0.9)
  params = transformer.init_params(_WIDE.config, key=jax.random.key(0))

  def step(mesh):
    create = train_state.make_create(_WIDE, mesh, settings)
    update = gradients.make_update(_WIDE, mesh, settings)
    _, shardings = train_state.param_layout(_WIDE, mesh)
    state = create(jax.device_put(params, shardings))
    return update(state, jax.device_put(params, shardings))[0]

  mesh = tiny.make_mesh(2, 2, 2)
  found, expected = step(mesh), step(tiny.make_mesh())
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5),
    jax.device_get(found),
    jax.device_get(expected),
  )
  # The average starts at the first params.
  jax.tree.map(
    lambda x, y, z: np.testing.assert_allclose(x, 0.9 * y + 0.1 * z, atol=1e-6),
    jax.device_get(found.average),
    jax.device_get(params),
    jax.device_get(found.params),
  )
  for x, sharding in zip(
    jax.tree.leaves(found),
    jax.tree.leaves(train_state.state_shardings(_WIDE, mesh, settings)),
    strict=True,
  ):
    assert x.sharding == sharding
  for path, x in jax.tree.leaves_with_path(found.opt_state):
    # Nothing large lies on every device.
    assert x.size < 256 or not x.sharding.is_fully_replicated, path
  specs = {x.sharding.spec for x in jax.tree.leaves(found.opt_state)}
  if kind == "adafactor":
    gate = found.opt_state[1][0]
    spec = gate.v_row["blocks"]["gate"].sharding.spec
    assert spec == jax.P(None, ("fsdp", "sequence"))
    assert gate.v_col["blocks"]["gate"].sharding.spec == jax.P(None, "tensor")
  else:
    embed = ("fsdp", "sequence")
    assert jax.P(None, "tensor", None, None, embed) in specs
  checkpoints = checkpoint.Checkpoints(tmp_path, max_to_keep=1)
  checkpoints.save(0, found, {})
  other = train_state.abstract_state(_WIDE, tiny.make_mesh(2, 1, 2), settings)
  restored, _ = checkpoints.restore(0, other)
  checkpoints.close()
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.device_get(restored),
    jax.device_get(found),
  )


@pytest.mark.parametrize(
  "changes, field",
  [
    ({"schedule": "quadratic"}, "schedule"),
    ({"schedule": "cosine", "warmup_steps": 100}, "warmup_steps"),
    ({"schedule": "linear", "warmup_steps": 100}, "warmup_steps"),
    ({"clip_norm": 0.0}, "clip_norm"),
    ({"kind": "sgd"}, "optimizer"),
  ],
)
def test_settings_that_cannot_work_are_refused(changes, field):
  settings = _settings()
  for name, value in changes.items():
    object.__setattr__(settings, name, value)
  with pytest.raises(ValueError, match=rf"config\.trainer\.{field}"):
    optimizers.make_optimizer(settings, tiny.POLICY)
