"""Schedule, optimizer and the layout of the train state."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from dora_jax.trainer import train_state
from tests.trainer import tiny


def _settings(**changes):
  return dataclasses.replace(tiny.OPTIMIZER, **changes)


def test_schedule_by_hand():
  settings = _settings(lr=1.0, warmup_steps=3, total_steps=7, schedule="cosine")
  schedule = train_state.make_schedule(settings)
  found = [np.asarray(schedule(step)) for step in range(8)]
  # Quarters up to 1, then (1 + cos(pi n / 4)) / 2.
  root = np.sqrt(0.5)
  expected = [0.25, 0.5, 0.75, 1.0, (1 + root) / 2, 0.5, (1 - root) / 2, 0.0]
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_first_update_is_the_learning_rate_times_the_sign():
  # Adam's first step is lr * g / (|g| + eps), weight decay adds lr * decay * p.
  settings = _settings(lr=0.5, eps=1e-12, weight_decay=0.1, clip_norm=1e-3)
  optimizer = train_state.make_optimizer(settings)
  params: Any = {"w": np.array([2.0, -4.0], np.float32)}
  gradients: Any = {"w": np.array([3.0, -5.0], np.float32)}
  updates: Any = optimizer.update(gradients, optimizer.init(params), params)[0]
  np.testing.assert_allclose(updates["w"], [-0.5 - 0.1, 0.5 + 0.2], rtol=1e-5)


@pytest.mark.parametrize(
  "changes, field",
  [
    ({"schedule": "linear"}, "schedule"),
    ({"schedule": "cosine", "warmup_steps": 100}, "warmup_steps"),
    ({"clip_norm": 0.0}, "clip_norm"),
  ],
)
def test_settings_that_cannot_work_are_refused(changes, field):
  with pytest.raises(ValueError, match=rf"config\.trainer\.{field}"):
    settings = _settings()
    for name, value in changes.items():
      object.__setattr__(settings, name, value)
    train_state.make_optimizer(settings)


def test_moments_are_sharded_as_the_params():
  mesh = tiny.make_mesh(fsdp=2, tensor=2)
  shardings = train_state.state_shardings(tiny.CONFIG, mesh, tiny.OPTIMIZER)
  params = jax.tree.leaves(shardings.params)
  assert len({sharding.spec for sharding in params}) > 1
  adam = shardings.opt_state[1][0]
  assert jax.tree.leaves(adam.mu) == params
  assert jax.tree.leaves(adam.nu) == params
  assert adam.count.is_fully_replicated
