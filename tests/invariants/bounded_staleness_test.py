"""C3: at training, a trajectory is at most K versions old; and K is used."""

import collections

import hypothesis
import pytest
from hypothesis import strategies as st

from dora_jax.coordinator import events as ev
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


@hypothesis.settings(max_examples=60, deadline=None)
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
      if not (isinstance(event, ev.Finished) and event.group_id == slow_group)
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
    slow = lambda e: isinstance(e, ev.Finished) and e.group_id == 0
    return next((i for i, e in enumerate(pending) if not slow(e)), 0)

  lags = run(world, pick)
  # The trainer went on without it for k steps, and then waited.
  assert lags[k] >= 1 and max(lags) == k
  assert world.coordinator.trainer_wait_s["straggler"] > 0
