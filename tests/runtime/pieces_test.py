"""What a config's schedule is made of, and what it is refused for."""

import pytest

from dora_jax.coordinator.schedules import registry
from dora_jax.runtime import pieces
from tests.runtime import tiny


@pytest.mark.parametrize("name", registry.NAMES)
def test_every_schedule_is_made_by_its_name(name):
  config = tiny.config(
    coordinator__schedule=name,
    coordinator__max_staleness=3,
    coordinator__rollout_groups="5",
    trainer__loss="decoupled_ppo",
  )
  schedule = pieces.make_schedule(config)
  assert type(schedule).__name__.lower() == name.replace("_", "")
  bounds = {"sync": 0, "replication": 0, "one_step_off": 1}
  assert schedule.max_staleness == bounds.get(name, 3)
  assert schedule.mixes_versions == (name == "partial_rollout")


def test_an_unknown_schedule_is_refused_with_those_there_are():
  config = tiny.config(coordinator__schedule="dorra")
  with pytest.raises(
    ValueError, match=r"'dorra': config\.coordinator\.schedule .*'sync', .*dora"
  ):
    pieces.make_schedule(config)


def test_mixed_versions_need_the_loss_that_takes_them():
  config = tiny.config(coordinator__schedule="partial_rollout")
  with pytest.raises(
    ValueError,
    match=r"config\.trainer\.loss is 'ppo_clip' but must be 'decoupled_ppo' "
    r"where config\.coordinator\.schedule is 'partial_rollout'",
  ):
    pieces.make_schedule(config)
