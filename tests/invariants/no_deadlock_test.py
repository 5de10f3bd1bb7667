"""From any reachable state the next step is reached, within C1, C2 and C3.

The world of `tests/coordinator/world.py` asserts at each command: one version a
group (C1), every member of a trained group generated and nothing trained twice
(C2), lag within 0 … K (C3), rule R2, no version freed that a generator serves,
and that tokens add up; and it fails where nothing is under way before the end.
"""

import collections
import itertools
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from dora_jax.coordinator import events as ev
from dora_jax.coordinator.schedules import registry
from tests.coordinator import driving
from tests.coordinator import world as world_lib

_STRATEGIES = ("repartition", "moves", "filling", "on_step")


@st.composite
def worlds(draw):
  schedule = draw(st.sampled_from((*registry.NAMES, "dora", "dora")))
  failing = draw(
    st.sets(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=5)
  )
  move_fails = draw(st.sampled_from([None, None, 2, 3]))
  attempts = itertools.count()
  group_size = draw(st.integers(1, 3))
  filters = group_size > 1 and draw(st.booleans())
  arguments = {
    "schedule": schedule,
    "max_staleness": draw(st.integers(0, 4)),
    "prompts_per_batch": draw(st.integers(1, 8)),
    "group_size": group_size,
    # One-sided are the even groups, and one of three odd ones.
    "solves": lambda group_id, member: (
      (group_id + group_id % 2 * member) % 3 == 0
    ),
    "max_filtered": 10_000 if filters else None,
    "num_steps": draw(st.integers(1, 8)),
    "slots": draw(st.lists(st.integers(1, 5), min_size=1, max_size=8)),
    "lanes_per_mesh": draw(st.integers(1, 3)),
    "rollout_groups": draw(st.one_of(st.none(), st.integers(1, 24))),
    "evict": draw(st.booleans()),
    "settings": {
      "kv_pressure": draw(st.sampled_from([0.5, 2.0])),
      **{name: draw(st.integers(0, 5)) > 0 for name in _STRATEGIES},
    },
    "num_groups": draw(st.one_of(st.none(), st.integers(1, 40))),
    "fails": lambda group_id, member: (group_id, member) in failing,
    "move_fails": lambda: (
      move_fails is not None and next(attempts) % move_fails == 0
    ),
  }
  # A world is built in the test: beartype draws from `random` on the way, which
  # no strategy may do.
  return arguments


def check_the_end(world: world_lib.World) -> None:
  """Asserts that everything that started has ended, once, for a reason."""
  made = world.coordinator
  ledger = made.ledger
  trained = list(itertools.chain(*world.batches))
  assert len(trained) == len(set(trained)) == ledger.num_trained
  assert ledger.dropped == collections.Counter(world.dropped.values())
  assert set(trained) | set(world.dropped) == set(range(ledger.next_group_id))
  assert not set(trained) & set(world.dropped)
  reasons = {"reward", "nonfinite"}
  if made.schedule.drops_groups:
    reasons.add("oversampled")
  if world.filters:
    reasons |= {"all_solved", "none_solved"}
    for group_id in trained:
      solved = [world.solves(group_id, m) for m in range(world.group_size)]
      assert 0 < sum(solved) < world.group_size
  assert set(world.dropped.values()) <= reasons
  assert made.versions_alive_max <= world.max_staleness + 1
  tokens = ledger.tokens
  assert tokens.open == tokens.ready == tokens.in_batch == 0
  # Nothing is left behind by what came and went.
  assert not (ledger.open or ledger._closed or ledger.num_untrained)
  assert not (made._placement.in_transit or made._surrender.regenerating)
  if not made.schedule.drops_groups:
    assert not (made._placement.waiting or world.running)
    assert not any(view.residents for view in made.fleet)
  json.dumps(made.snapshot())


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
  worlds(),
  st.randoms(use_true_random=False),
  st.sampled_from(driving.PACES),
  st.sampled_from([0.0, 0.1]),
)
def test_every_run_ends_and_accounts_for_every_group(
  arguments, rng, pace, fault_rate
):
  world = world_lib.World(**arguments)
  driving.drive(world, rng, pace, fault_rate=fault_rate)
  check_the_end(world)
  if world.stop == "finished":
    assert len(world.batches) == world.coordinator.newest_version
  else:
    assert world.stop == "data_exhausted"
    assert all(len(b) == len(world.batches[0]) for b in world.batches[:-1])


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
  st.randoms(use_true_random=False),
  st.sampled_from(["tail", "any", "fast_trainer"]),
  st.sampled_from([1, 2]),
  st.booleans(),
)
def test_runs_with_many_moves_end_too(rng, pace, lanes_per_mesh, evict):
  world = driving.roomy(
    rng,
    lanes_per_mesh=lanes_per_mesh,
    evict=evict,
    num_steps=4,
    move_fails=lambda: rng.random() < 0.3,
  )
  driving.drive(world, rng, pace, fault_rate=0.05)
  assert world.stop == "finished"
  check_the_end(world)


def small(schedule: str, num_groups: int, **options) -> world_lib.World:
  """Batches of 4 groups, with data for fewer than the run's 8 steps."""
  return world_lib.World(
    schedule=schedule,
    max_staleness=2,
    prompts_per_batch=4,
    group_size=2,
    num_steps=8,
    slots=[2, 3],
    num_groups=num_groups,
    **options,
  )


@pytest.mark.parametrize("schedule", registry.NAMES)
@pytest.mark.parametrize("num_groups", [1, 3, 4, 5, 8, 9])
def test_rewards_that_all_fail_end_the_run_with_the_data(schedule, num_groups):
  world = small(schedule, num_groups, fails=lambda group_id, member: True)
  world.run(itertools.repeat(0))
  assert world.stop == "data_exhausted" and not world.batches
  assert world.dropped == dict.fromkeys(range(num_groups), "reward")


@pytest.mark.parametrize("schedule", registry.NAMES)
@pytest.mark.parametrize("num_groups", [1, 3, 4, 5, 8, 9])
def test_data_of_any_size_is_trained_to_its_end(schedule, num_groups):
  world = small(schedule, num_groups)
  world.run(itertools.repeat(0))
  assert world.stop == "data_exhausted"
  num_trained = sum(len(batch) for batch in world.batches)
  assert num_trained + len(world.dropped) == num_groups
  if schedule != "replication":
    assert not world.dropped
    assert [len(b) for b in world.batches] == [4] * (num_groups // 4) + (
      [num_groups % 4] if num_groups % 4 else []
    )


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
  worlds(), st.randoms(use_true_random=False), st.integers(0, 60)
)
def test_a_run_asked_to_stop_ends_after_its_step(arguments, rng, num_before):
  world = world_lib.World(**arguments)
  for _ in range(num_before):
    if world.stop is None:
      world.step(rng.randint(0, len(world.pending) - 1))
  if world.stop is not None:
    return
  num_batches = len(world.batches)
  world.send(ev.StopRequested(reason="interrupted"))
  steps = [e for e in world.pending if isinstance(e, ev.StepDone)]
  for event in steps:
    world.send(event)
  assert world.stop == "interrupted"
  assert len(world.batches) == num_batches


@pytest.mark.parametrize("schedule", registry.NAMES)
def test_filtered_groups_are_refilled_and_not_trained(schedule):
  # Two of three groups are one-sided: all solve the first, none the second.
  solves = lambda group_id, member: (
    group_id % 3 == 0 or (group_id % 3 == 2 and member == 0)
  )
  world = small(schedule, 400, solves=solves, max_filtered=100)
  world.run(itertools.repeat(0))
  assert world.stop == "finished" and len(world.batches) == 8
  trained = list(itertools.chain(*world.batches))
  assert len(trained) == 32 and all(g % 3 == 2 for g in trained)
  reasons = collections.Counter(world.dropped.values())
  # Replication drops many before it is known that they are one-sided.
  least = 1 if schedule == "replication" else 31
  assert reasons["all_solved"] >= least and reasons["none_solved"] >= least
  for group_id, reason in world.dropped.items():
    if reason in ("all_solved", "none_solved"):
      assert reason == ("all_solved", "none_solved")[group_id % 3]
  world.coordinator.ledger.tokens.check()


@pytest.mark.parametrize("schedule", registry.NAMES)
@pytest.mark.parametrize("is_solved", [True, False])
def test_a_run_whose_groups_are_all_filtered_ends(schedule, is_solved):
  solves = lambda group_id, member: is_solved
  world = small(schedule, 400, solves=solves, max_filtered=12)
  world.run(itertools.repeat(0))
  assert world.stop == "nothing_to_learn" and not world.batches
  reasons = collections.Counter(world.dropped.values())
  assert reasons["all_solved" if is_solved else "none_solved"] == 12
  # With less data than that, the data ends first.
  world = small(schedule, 9, solves=solves, max_filtered=12)
  world.run(itertools.repeat(0))
  assert world.stop == "data_exhausted" and not world.batches
