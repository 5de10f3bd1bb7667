"""Algorithm 1 in the coordinator: the paper's example, and its triggers."""

import collections
import random

import pytest

from dora_jax.coordinator import events as ev
from tests.coordinator import driving, scene
from tests.coordinator import world as world_lib


def test_the_worked_example_of_the_paper():
  made = scene.coordinator_of(
    [
      (1, {}),
      (2, {g: [0] for g in (0, 1, 2, 3)}),
      (3, {4: [0], 5: [0]}),
      (3, {6: [0]}),
    ],
    newest_version=3,
    # 7 run, so 16 of the new version 4 are injected.
    rollout_groups=23,
    # The paper fills an idle slot of V3 with one new request as well.
    filling=False,
  )
  commands = made.handle(ev.StepDone(version=4), 0.0)
  # V2 keeps one generator, V3 consolidates on one, V4 gets two. The paper's
  # picture carries V2's four requests to DP0 and three of V3 to DP1; that many
  # bytes are not needed: V2 stays, and one request of V3 moves.
  assert scene.of_class(commands, ev.Move) == [
    ev.Move(source_id=3, target_id=2, version=3, requests=((6, 0),))
  ]
  assert scene.of_class(commands, ev.Load) == [
    ev.Load(generator_id=0, version=4)
  ]
  assert scene.of_class(commands, ev.Release) == [ev.Release(version=1)]
  (move,) = scene.of_class(commands, ev.Move)
  commands = made.handle(scene.moved(move), 1.0)
  assert scene.of_class(commands, ev.Load) == [
    ev.Load(generator_id=3, version=4)
  ]
  assert list(made.fleet[2].residents) == [(4, 0), (5, 0), (6, 0)]
  new = collections.Counter()
  for generator_id in (0, 3):
    loaded = ev.Loaded(generator_id=generator_id, version=4)
    for submit in scene.of_class(made.handle(loaded, 2.0), ev.Submit):
      assert submit.version == 4
      new[submit.generator_id] += len(submit.members)
  assert new == {0: 8, 3: 8}
  assert [view.version for view in made.fleet] == [4, 2, 3, 4]
  assert made.balancer.counts == {"step": 1}


def test_a_request_stays_where_it_is_unless_it_must_go():
  # Two of four generators belong to each version by its requests, as it is.
  made = scene.coordinator_of(
    [
      (1, {0: [0], 1: [0], 2: [0], 3: [0]}),
      (1, {4: [0], 5: [0], 6: [0], 7: [0]}),
      (2, {8: [0], 9: [0], 10: [0]}),
      (2, {11: [0], 12: [0], 13: [0], 14: [0]}),
    ],
    newest_version=2,
    rollout_groups=15,
    period_s=1.0,
  )
  assert not scene.of_class(made.handle(ev.Tick(), 5.0), ev.Move)
  assert made.balancer.counts == {"period": 1}
  assert all(view.leaving_for is None for view in made.fleet)


def test_a_request_on_its_way_counts_once():
  made = scene.coordinator_of(
    [
      (1, {0: [0], 1: [0]}),
      (1, {}),
      (1, {2: [0], 3: [0]}),
      (2, {g: [0] for g in range(4, 11)}),
    ],
    newest_version=2,
  )
  view = made.fleet[0]
  view.leaving_for = 2
  made.fleet.update(view, 0.0)
  made._placement.move_away(view, 0.0)
  assert set(made._placement.in_transit.values()) == {1}
  # 4 * (4, 7 + 1 that is to start) / 12 = 1.3 and 2.7, so one is enough for
  # version 1. Were the two on their way counted at both ends, it kept two.
  moves = scene.of_class(made.handle(ev.Tick(), 20.0), ev.Move)
  assert [(m.source_id, m.requests) for m in moves] == [(2, ((2, 0), (3, 0)))]


def test_a_lane_takes_the_version_that_its_mesh_holds():
  # Lanes 0 and 1 share a mesh, 2 and 3 another, which holds version 2 already.
  made = scene.coordinator_of(
    [(1, {0: [0], 1: [0]}), (1, {2: [0]}), (2, {3: [0]}), (1, {4: [0]})],
    newest_version=2,
    rollout_groups=13,
    lanes_per_mesh=2,
    period_s=1.0,
  )
  moves = scene.of_class(made.handle(ev.Tick(), 5.0), ev.Move)
  # 4 * (4, 9) / 13: version 2 gets two more than one. Lane 3 loads for nothing.
  assert 3 in {move.source_id for move in moves}
  assert made.fleet[3].leaving_for == 2
  assert made.fleet[2].leaving_for is None


def report(made, generator_id, share, now_s):
  made.handle(
    ev.Progress(
      generator_id=generator_id,
      num_sampled=0,
      num_kv_tokens=10,
      num_waiting=0,
      pages_used=round(100 * share),
      num_pages=100,
    ),
    now_s,
  )
  return made.balancer.counts["kv_pressure"]


def test_kv_pressure_counts_once_as_it_passes_the_threshold():
  made = scene.coordinator_of(
    [(1, {}), (1, {}), (1, {})],
    newest_version=1,
    lanes_per_mesh=2,
    kv_pressure=0.9,
  )
  shares = [(0, 0.5), (0, 0.9), (0, 0.95), (0, 0.89), (0, 0.9)]
  counts = [
    report(made, g, share, float(t)) for t, (g, share) in enumerate(shares)
  ]
  assert counts == [0, 1, 1, 1, 2]
  # The other lane of a pressed mesh says the same thing again; another mesh,
  # which has room, says nothing about this one.
  assert report(made, 1, 0.9, 9.0) == 2
  assert report(made, 2, 0.1, 10.0) == 2
  assert report(made, 0, 0.9, 11.0) == 2
  assert report(made, 2, 0.9, 12.0) == 3


def test_the_period_counts_from_whatever_shared_out_last():
  made = scene.coordinator_of([(1, {}), (1, {})], newest_version=1)
  assert made.balancer.settings.period_s == 10.0
  for now_s in (9.0, 11.0, 20.0):
    made.handle(ev.Tick(), now_s)
  assert made.balancer.counts == {"period": 1}
  made.handle(ev.StepDone(version=2), 22.0)
  for now_s in (31.0, 32.0):
    made.handle(ev.Tick(), now_s)
  assert made.balancer.counts == {"period": 2, "step": 1}


@pytest.mark.parametrize("pace", ["tail", "fast_trainer", "any"])
def test_live_requests_are_really_moved(pace):
  moved = []
  for seed in range(8):
    rng = random.Random(seed)
    world = driving.roomy(rng)
    driving.drive(world, rng, pace)
    moved.append(world.num_moved)
    assert world.coordinator.ledger.num_moved == world.num_moved
    assert world.coordinator.ledger.tokens.reprefilled == 0
  assert sum(moved) > 0 and sum(n > 0 for n in moved) >= 4


def test_without_moves_none_is_made():
  rng = random.Random(0)
  world = driving.roomy(rng, settings={"moves": False})
  driving.drive(world, rng, "tail")
  assert isinstance(world, world_lib.World) and world.num_moved == 0
