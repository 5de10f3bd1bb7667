"""What is taken again: worked out by hand, and as often as it should be."""

import collections
import itertools

from dora_jax.coordinator import reuse
from tests.coordinator import world as world_lib


def _made(groups_per_step, max_uses, *, max_staleness):
  settings = reuse.Settings(groups_per_step=groups_per_step, max_uses=max_uses)
  return reuse.Reuse(settings, max_staleness=max_staleness)


def test_by_hand():
  made = _made(2, 2, max_staleness=2)
  # Step 0 trains on groups 0 to 2 of version 0.
  assert made.take(0) == ()
  made.remember({0: 0, 1: 0, 2: 0})
  assert made.kept(0) == (0, 1, 2)
  first = made.take(1)
  assert len(first) == 2 and {*first} < {0, 1, 2}
  made.remember({3: 1, 4: 0})
  (left,) = {0, 1, 2} - {*first}
  # Two uses are all there are. At step 3, what is of version 0 is too old.
  assert {*made.kept(1)} == {left, 3, 4}
  second = made.take(2)
  assert {*second} < {left, 3, 4}
  expected = {3} - {*second}
  assert {*made.take(3)} == expected
  assert made.take(4) == ()
  assert made.lag_counts.total() == 4 + len(expected)
  assert max(made.lag_counts) <= 2


def test_a_skipped_step_gives_back_what_is_kept_and_was_not_in_it():
  made = _made(2, 9, max_staleness=2)
  made.remember({0: 0, 1: 0})
  assert made.take(1) == (0, 1)
  made.remember({2: 1, 3: 1, 4: 1})
  taken = made.take(2)  # Two of the three that were taken less.
  made.remember({5: 2})
  (left,) = {2, 3, 4} - {*taken}
  assert {*made.kept(2)} == {2, 3, 4, 5}
  made.withdraw(2, [5], taken)
  # Groups 0 and 1 would not be too old for step 2, but nobody has them still.
  assert made.take(2) == (left,)
  assert made.lag_counts == {1: 2 + 1}


def test_what_was_taken_less_comes_first():
  made = _made(1, 9, max_staleness=9)
  made.remember({0: 0, 1: 0, 2: 0})
  taken = [group_id for step in range(1, 7) for group_id in made.take(step)]
  assert sorted(taken[:3]) == sorted(taken[3:]) == [0, 1, 2]


def test_neither_old_nor_new_groups_are_preferred():
  counts = collections.Counter()
  for first in range(0, 4000, 4):
    made = _made(1, 2, max_staleness=9)
    made.remember({first + i: 0 for i in range(4)})
    (group_id,) = made.take(1)
    counts[group_id - first] += 1
  assert all(200 < counts[i] < 300 for i in range(4))


def test_a_run_reuses_and_each_new_group_still_counts_once():
  world = world_lib.World(
    max_staleness=2,
    prompts_per_batch=4,
    group_size=2,
    num_steps=8,
    slots=[4, 4],
    reuse=reuse.Settings(groups_per_step=2, max_uses=2),
  )
  world.run(itertools.cycle([3, 0, 5, 1]))
  ledger = world.coordinator.ledger
  assert ledger.num_trained == sum(map(len, world.batches)) == 32
  # Unless all that is young enough has had its uses, two in each step.
  num_reused = [len(ids) for ids in world.reused]
  assert num_reused[0] == 0 and max(num_reused) == 2 and sum(num_reused) > 6
  assert world.coordinator.reused_lag_counts.total() == sum(num_reused)
  assert sum(ledger.lag_counts.values()) == 64
