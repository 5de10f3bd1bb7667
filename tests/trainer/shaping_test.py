"""Shaped rewards against numbers worked out by hand."""

import dataclasses

import numpy as np
import pytest

from dora_jax.trainer import shaping
from tests.trainer import tiny


def _group(lengths, **changes):
  rng = np.random.default_rng(0)
  (group,) = tiny.make_groups(1)
  trajectories = tuple(
    tiny.make_trajectory(
      rng, prompt=np.array([1]), length=length, group_id=0, member=member
    )
    for member, length in enumerate(lengths)
  )
  return dataclasses.replace(
    group,
    trajectories=trajectories,
    rewards=np.array([1.0, 0.0, 1.0]),
    **changes,
  )


def test_the_overlong_penalty_falls_linearly():
  found = shaping.overlong_penalty(
    np.array([1, 8, 9, 11, 12]), max_length=12, buffer=4
  )
  assert found.tolist() == [0.0, 0.0, -0.25, -0.75, -1.0]


def test_components_stay_named_and_the_tasks_reward_as_it_is():
  group = _group([3, 10, 12], components={"parsed": np.array([1.0, 1.0, 0.0])})
  settings = dataclasses.replace(
    tiny.SHAPING, weights={"parsed": 0.5}, overlong_penalty=0.2
  )
  shaped = shaping.shape(group, settings)
  # 10 of 12 is half of the buffer of 4.
  assert shaped.components["overlong"].tolist() == [0.0, -0.1, -0.2]
  np.testing.assert_allclose(shaped.rewards, [1.5, 0.4, 0.8])
  assert group.rewards.tolist() == [1.0, 0.0, 1.0]
  metrics = shaping.component_metrics([shaped])
  np.testing.assert_allclose(metrics["reward_component/parsed"], 1 / 3)
  np.testing.assert_allclose(metrics["reward_component/overlong"], -0.1)
  assert metrics["untrained_share"] == 0.0


def test_truncated_members_are_left_out_where_asked():
  # The first of tiny's members is the one that was cut.
  settings = dataclasses.replace(tiny.SHAPING, masks_truncated=True)
  shaped = shaping.shape(_group([3, 4, 5]), settings)
  assert shaped.is_trained.tolist() == [False, True, True]
  assert shaped.rewards.tolist() == [1.0, 0.0, 1.0]
  assert shaping.shape(_group([3, 4, 5]), tiny.SHAPING).is_trained.all()


def test_a_component_that_nothing_returns_is_refused():
  settings = dataclasses.replace(tiny.SHAPING, weights={"format": 1.0})
  with pytest.raises(
    ValueError, match=r"reward_weights names 'format', .*\[\]"
  ):
    shaping.shape(_group([3, 4, 5]), settings)
