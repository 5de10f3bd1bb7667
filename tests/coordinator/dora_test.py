"""Automatic RBS: what moves the aim, worked out by hand."""

import pytest

from dora_jax.coordinator import events as ev
from dora_jax.coordinator.schedules import base, dora
from tests.coordinator import world as world_lib


def _complete(world, kind):
  """All things of a kind that are under way are done."""
  for thing in [p for p in world.pending if isinstance(p, kind)]:
    world.step(world.pending.index(thing))


def _make_ready(world, *group_ids):
  """Groups of one member finish and get their scores."""
  for group_id in group_ids:
    for _ in range(2):
      (at,) = (
        at
        for at, p in enumerate(world.pending)
        if getattr(p, "group_id", None) == group_id
      )
      world.step(at)


@pytest.mark.parametrize(("is_held", "target"), [(True, 4), (False, 6)])
def test_the_aim_grows_by_what_was_lacking_and_not_by_stragglers(
  is_held, target
):
  world = world_lib.World(
    max_staleness=2,
    prompts_per_batch=2,
    group_size=1,
    num_steps=8,
    slots=[8, 8, 8],
  )
  _complete(world, ev.Loaded)
  _make_ready(world, 0, 1)
  assert world.batches == [(0, 1)]
  # Groups 4 and 5 have begun in their place, with version 0 as well.
  _make_ready(world, 4, 5)
  _complete(world, ev.StepDone)
  assert world.batches[1:] == [(4, 5)]
  _complete(world, ev.Loaded)
  if is_held:
    _make_ready(world, 6, 7)
  _complete(world, ev.StepDone)
  # Rule R1: groups 2 and 3 of version 0 must be in step 2.
  assert len(world.batches) == 2
  assert world.coordinator.schedule.target == 4
  world.now_s += 1000.0
  _make_ready(world, 2, 3)
  assert world.batches[2:] == [(2, 3)]
  assert world.coordinator.schedule.target == target


def test_the_aim_shrinks_by_what_four_steps_have_left_over():
  options = base.Options(
    max_staleness=3,
    prompts_per_batch=16,
    rollout_groups=None,
    oversample=1.0,
    evict=False,
  )
  made = dora.Dora(options)
  assert made.target == 32

  def start(*, num_ready, lacked_s):
    view = world_lib.World(
      max_staleness=3,
      prompts_per_batch=16,
      group_size=1,
      num_steps=1,
      slots=[1],
    ).coordinator._view
    view.ledger.ready[:] = [(0, group_id) for group_id in range(num_ready)]
    made.step_started(view, lacked_s=lacked_s, step_s=10.0)

  for num_ready in (9, 12, 8, 30):
    assert made.target == 32
    start(num_ready=num_ready, lacked_s=0.1)
  # 8 were never needed; an eighth of a batch stays as a reserve.
  assert made.target == 32 - (8 - 2)
  # A quarter of a step without groups: a quarter of a batch more.
  start(num_ready=0, lacked_s=2.5)
  assert made.target == 26 + 4
