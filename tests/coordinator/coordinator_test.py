"""What can go wrong between two events, case by case."""

import json
import random

import pytest

from dora_jax.coordinator import events as ev
from tests.coordinator import driving, scene
from tests.coordinator import world as world_lib


def test_an_evicted_group_waits_for_its_moves_to_be_spoken_of():
  made = scene.coordinator_of(
    [(0, {0: [0, 1]}), (0, {1: [0, 1, 2]}), (1, {2: [0, 1, 2]})],
    newest_version=1,
    num_slots=4,
    group_size=3,
    prompts_per_batch=1,
    max_staleness=1,
    evict=True,
    is_training=False,
  )
  # Member 2 of group 0 has been scored long ago.
  made.ledger.open[0].waiting.clear()
  view = made.fleet[0]
  view.leaving_for = 1
  made.fleet.update(view, 0.0)
  (move,) = made._placement.move_away(view, 0.0)
  assert move.requests == ((0, 0),)  # One slot is free on generator 1.
  # It finishes before it can be carried, and is scored.
  made.handle(scene.finish(0, 0, on=0, version=0), 1.0)
  made.handle(ev.Scored(group_id=0, member=0), 2.0)
  commands = []
  for member in range(3):
    made.handle(scene.finish(2, member, on=2, version=1), 3.0)
    commands += made.handle(ev.Scored(group_id=2, member=member), 3.0)
  # Step 1 may not start before group 0 is trained: it is to begin anew. But the
  # Moved to come will name (0, 0), and must not mean its successor.
  cancels = {c.requests for c in scene.of_class(commands, ev.Cancel)}
  assert cancels == {((1, 0), (1, 1), (1, 2))}
  assert not scene.of_class(commands, ev.Train)
  commands = made.handle(scene.moved(move, left=move.requests), 4.0)
  commands += made.handle(ev.Tick(), 4.0)
  assert scene.of_class(commands, ev.Cancel) == [
    ev.Cancel(generator_id=0, requests=((0, 1),))
  ]
  json.dumps(made.snapshot())
  commands = made.handle(
    ev.Cancelled(generator_id=0, cancelled=((0, 1, 4),)), 5.0
  )
  assert ev.Restart(group_id=0) in commands
  assert made.ledger.tokens.dropped["evicted"] == 5 + 4
  # A counter as a key would not do in JSON.
  tokens = json.loads(json.dumps(made.snapshot()))["ledger"]["tokens"]
  assert tokens["dropped"] == {"evicted": 9}


def test_members_that_a_lost_target_took_along_get_a_generator_at_once():
  made = scene.coordinator_of(
    [(1, {0: [0]}), (1, {}), (2, {1: [0]}), (2, {2: [0]})],
    newest_version=2,
    rollout_groups=3,
    num_slots=1,
    period_s=0.0,
  )
  view = made.fleet[0]
  view.leaving_for = 2
  made.fleet.update(view, 0.0)
  (move,) = made._placement.move_away(view, 0.0)
  made.handle(ev.GeneratorLost(generator_id=1), 1.0)
  # It had arrived: generator 0, which is idle now, was to leave version 1. But
  # nobody else serves it.
  made.handle(scene.moved(move), 2.0)
  group = made.ledger.open[0]
  assert group.running == {0: 0} or made.fleet[0].loading == 1
  assert made.balancer.counts["lost"] == 2


def test_one_that_joins_late_serves_the_newest_or_an_orphaned_version():
  made = scene.coordinator_of(
    [(1, {0: [0]}), (2, {1: [0]})], newest_version=2, num_slots=1
  )
  joins = lambda generator_id: scene.of_class(
    made.handle(
      ev.GeneratorJoined(
        generator_id=generator_id, num_slots=1, mesh_id=7, kv_capacity=10
      ),
      1.0,
    ),
    ev.Load,
  )
  assert joins(2) == [ev.Load(generator_id=2, version=2)]
  # The last that served version 1 is lost; its request waits. Generator 1 is
  # busy, and generator 2 under way to version 2.
  made.handle(ev.GeneratorLost(generator_id=0), 2.0)
  assert joins(3) == [ev.Load(generator_id=3, version=1)]
  # One is enough.
  assert joins(4) == [ev.Load(generator_id=4, version=2)]
  commands = made.handle(ev.Loaded(generator_id=3, version=1), 3.0)
  assert scene.of_class(commands, ev.Submit) == [
    ev.Submit(generator_id=3, group_id=0, members=(0,), version=1)
  ]


def test_an_empty_generator_has_no_kv_to_carry_and_nobody_to_wait_for_pages():
  made = scene.coordinator_of([(1, {0: [0]}), (1, {})], newest_version=1)
  made.handle(
    ev.Progress(
      generator_id=0,
      num_sampled=9,
      num_kv_tokens=50,
      num_waiting=1,
      pages_used=1,
      num_pages=2,
    ),
    1.0,
  )
  assert made.fleet[0].waits_for == "pages"
  made.handle(scene.finish(0, 0, on=0, version=1), 2.0)
  assert made.fleet[0].kv_tokens == made.fleet[0].num_waiting == 0
  assert made.fleet[0].waits_for == "prompts"


@pytest.mark.parametrize(
  ("event", "message"),
  [
    (ev.StepDone(version=3), "A step made version 3, but version 2 was"),
    (ev.Loaded(generator_id=0, version=2), "was asked for None"),
    (ev.Scored(group_id=0, member=0), "does not wait for a reward"),
    (ev.GeneratorLost(generator_id=9), "Generator 9 is spoken of"),
    (scene.finish(0, 0, on=0, version=0), "finished with version 0"),
    (ev.DataExhausted(num_groups=0), "The data ends after 0 groups, but 1"),
  ],
)
def test_an_event_that_contradicts_the_orders_raises(event, message):
  made = scene.coordinator_of([(1, {0: [0]})], newest_version=1)
  with pytest.raises(ValueError, match=message):
    made.handle(event, 1.0)


@pytest.mark.parametrize(
  ("schedule", "group_size", "num_needed"),
  [
    ("dora", 4, 4),
    # Half of the generator is enough for a group as large as it.
    ("dora", 8, 4),
    # Here no generator changes version before the last member is done.
    ("sync", 4, 1),
  ],
)
def test_a_group_starts_when_all_of_it_has_slots(
  schedule, group_size, num_needed
):
  world = world_lib.World(
    schedule=schedule,
    max_staleness=1,
    prompts_per_batch=8,
    group_size=group_size,
    num_steps=2,
    slots=[8],
    rollout_groups=16,
  )
  world.step(0)
  assert len(world.running) == 8
  for num_free in range(1, num_needed):
    world.step(0)
    assert len(world.running) == 8 - num_free
  world.step(0)
  assert len(world.running) == 8


def _num_filled(rollout_groups, monkeypatch):
  """Groups that began with a legacy version though others had the newest."""
  filled = []

  def submit(self, command):
    newest_version = self.coordinator.newest_version
    is_new = command.group_id not in self.versions
    if is_new and command.version < newest_version:
      filled.append(self.coordinator.fleet.is_served(newest_version))
    return _submit(self, command)

  _submit = world_lib.World._submit
  monkeypatch.setattr(world_lib.World, "_submit", submit)
  for seed in range(5):
    world = world_lib.World(
      max_staleness=3,
      prompts_per_batch=4,
      group_size=1,
      num_steps=12,
      slots=[4, 4, 4],
      rollout_groups=rollout_groups,
    )
    driving.drive(world, random.Random(seed), "tail")
  monkeypatch.undo()
  return sum(filled)


def test_legacy_slots_are_filled_only_where_work_in_flight_is_fixed(
  monkeypatch,
):
  assert _num_filled(16, monkeypatch) > 0
  assert _num_filled(None, monkeypatch) == 0
