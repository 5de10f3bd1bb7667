"""C3: at training, a trajectory is at most K versions old; and K is used."""

import collections

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.coordinator import driving
from tests.coordinator import world as world_lib


def run(world, pick):
  def choices():
    while True:
      yield pick(world.pending)

  world.run(choices())
  lags = collections.Counter(
    step - world.versions[group_id]
    for step, batch in enumerate(world.batches)
    for group_id in batch
  )
  return lags


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
  rng=st.randoms(use_true_random=False),
  k=st.integers(0, 4),
  rollout_groups=st.one_of(st.none(), st.integers(1, 40)),
  slow_group=st.integers(0, 11),
)
def test_a_straggler_is_waited_for_and_never_too_old(
  rng, k, rollout_groups, slow_group
):
  world = world_lib.World(
    max_staleness=k,
    prompts_per_batch=2,
    group_size=2,
    num_steps=10,
    slots=[4, 4, 4],
    rollout_groups=rollout_groups,
  )

  def pick(pending):
    # One group's members come last whenever anything else can.
    others = [
      index
      for index, event in enumerate(pending)
      if not (
        isinstance(event, world_lib.Finish) and event.group_id == slow_group
      )
    ]
    return rng.choice(others) if others else 0

  lags = run(world, pick)
  assert max(lags) <= k
  assert world.coordinator.ledger.lag_counts == {
    lag: 2 * count for lag, count in lags.items()
  }


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_straggler_that_outlasts_everything_reaches_the_bound_exactly(k):
  world = world_lib.World(
    max_staleness=k,
    prompts_per_batch=2,
    group_size=2,
    num_steps=10,
    slots=[4, 4, 4, 4],
    rollout_groups=20,
  )

  def pick(pending):
    slow = lambda e: isinstance(e, world_lib.Finish) and e.group_id == 0
    return next((i for i, e in enumerate(pending) if not slow(e)), 0)

  lags = run(world, pick)
  # The trainer went on without it for k steps, and then waited.
  assert lags[k] >= 1 and max(lags) == k
  assert world.coordinator.trainer_wait_s["straggler"] > 0


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
  rng=st.randoms(use_true_random=False),
  k=st.integers(0, 4),
  pace=st.sampled_from(["slow_trainer", "fast_trainer"]),
  rollout_groups=st.sampled_from([None, 40]),
)
def test_a_trainer_that_lags_or_races_stays_within_the_bound(
  rng, k, pace, rollout_groups
):
  # The world asserts R2 after every event, and the lag of every batch.
  world = world_lib.World(
    max_staleness=k,
    prompts_per_batch=4,
    group_size=1,
    num_steps=8,
    slots=[3, 3, 3, 3, 3],
    rollout_groups=rollout_groups,
  )
  driving.drive(world, rng, pace)
  lags = world.coordinator.ledger.lag_counts
  assert max(lags) <= k
  if pace == "slow_trainer" and rollout_groups is not None:
    # Rollout is always ahead as far as it may: the bound is reached.
    assert max(lags) == k
