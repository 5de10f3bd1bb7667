"""A run that was killed and resumed is the run that was not.

Promise (design.md, section 7): resumed = uninterrupted; and exactly once, also
over crashes. Here for the bare coordinator: its snapshot holds all of it, and
what it decides after a crash keeps every promise.
"""

import json
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from dora_jax.coordinator import events as ev
from dora_jax.coordinator import reuse
from tests.coordinator import crashes, driving
from tests.coordinator import world as world_lib
from tests.invariants import no_deadlock_test


class _Twins:
  """A coordinator and one restored from its snapshot, which must agree."""

  def __init__(self, first, make):
    self.first, self._make = first, make
    self.part()

  def part(self) -> None:
    """Makes the second anew, from the text of the first's snapshot."""
    self.second = self._make()
    self.second.restore(json.loads(json.dumps(self.first.snapshot())))

  def handle(self, event, now_s):
    commands = self.first.handle(event, now_s)
    assert self.second.handle(event, now_s) == commands
    return commands

  def __getattr__(self, name):
    return getattr(self.first, name)


def _reuse(groups_per_step: int) -> reuse.Settings:
  return reuse.Settings(groups_per_step=groups_per_step, max_uses=3)


def _check_under_way(world) -> None:
  """What would be commanded again is what the world is busy with."""
  made = world.coordinator
  if made.schedule.drops_groups or made.ledger.num_regenerated:
    with pytest.raises(
      ValueError, match=r"had been given up or generated anew"
    ):
      made.under_way()
    return
  if made._placement.cancelling:
    return
  loading = {
    view.generator_id for view in made.fleet if view.loading is not None
  }
  found: list = []
  serving = {}
  for command in made.under_way():
    match command:
      case ev.Submit():
        began = {world.began[command.group_id, m] for m in command.members}
        assert world.may_mix or began == {command.version}
        found += [
          world_lib.Finish(group_id=command.group_id, member=member)
          for member in command.members
        ]
      case ev.Score():
        found.append(("score", command.group_id, command.member))
      case ev.Train():
        assert command.group_ids == world.batches[-1]
        found.append(ev.StepDone(version=command.step + 1))
      case ev.Load() if command.generator_id in loading:
        found.append(
          ev.Loaded(generator_id=command.generator_id, version=command.version)
        )
      case ev.Load():
        serving[command.generator_id] = command.version
      case _:
        found.append(command)
  expected = [
    ("score", thing.group_id, thing.member)
    if isinstance(thing, ev.Scored | ev.ScoreFailed)
    else thing
    for thing in world.pending
  ]
  assert sorted(map(repr, found)) == sorted(map(repr, expected))
  assert serving == {g: v for g, v in world.serving.items() if v is not None}


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  no_deadlock_test.worlds(),
  st.randoms(use_true_random=False),
  st.sampled_from(driving.PACES),
  st.sampled_from([0.0, 0.1]),
  st.integers(0, 2),
)
def test_a_restored_coordinator_decides_as_the_first_would(
  arguments, rng, pace, fault_rate, num_reused
):
  world = world_lib.World(**arguments, reuse=_reuse(num_reused))
  twins = _Twins(world.coordinator, world.make_coordinator)
  world.coordinator = twins
  while world.stop is None:
    assert world.pending
    if rng.random() < fault_rate:
      driving.disturb(world, rng)
    if rng.random() < 0.1:
      twins.part()
      if not fault_rate:
        _check_under_way(world)
    if world.stop is None:
      world.step(driving.choose(world, rng, pace))
  first, second = twins.first.snapshot(), twins.second.snapshot()
  assert json.dumps(first) == json.dumps(second)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  no_deadlock_test.worlds(),
  st.randoms(use_true_random=False),
  st.sampled_from(driving.PACES),
  st.sampled_from([0.0, 0.05]),
  st.sampled_from([0.02, 0.2]),
  st.integers(0, 2),
)
def test_every_group_is_trained_once_over_any_crashes(
  arguments, rng, pace, fault_rate, crash_rate, num_reused
):
  world = world_lib.World(**arguments, reuse=_reuse(num_reused))
  saved = crashes.save(world)
  num_crashes = 0
  while world.stop is None:
    assert world.pending, f"deadlock: {world.coordinator.snapshot()}"
    if rng.random() < fault_rate:
      driving.disturb(world, rng)
    if rng.random() < 0.1:
      saved = crashes.save(world)
    if rng.random() < crash_rate and num_crashes < 20:
      num_crashes += 1
      world = crashes.resume(saved, rng)
    if world.stop is None:
      world.step(driving.choose(world, rng, pace))
  no_deadlock_test.check_the_end(world)


@pytest.mark.parametrize("schedule", ["sync", "dora"])
def test_the_order_of_prompts_is_that_without_a_crash(schedule):
  arguments = {
    "schedule": schedule,
    "max_staleness": 2,
    "prompts_per_batch": 3,
    "group_size": 2,
    "num_steps": 8,
    "slots": [3, 3],
  }
  world = world_lib.World(**arguments)
  driving.drive(world, random.Random(0), "oldest")
  rng = random.Random(1)
  other = world_lib.World(**arguments)
  for _ in range(200):
    saved = crashes.save(other)
    for _ in range(rng.randint(0, 6)):
      if other.stop is None:
        other.step(driving.choose(other, rng, "oldest"))
    if other.stop is not None:
      break
    if rng.random() < 0.5:
      other = crashes.resume(saved, rng)
  driving.drive(other, rng, "oldest")
  assert other.batches == world.batches
