"""From any reachable state the next step is reached, within C1, C2 and C3.

The world of `tests/coordinator/world.py` asserts at each command: one version a
group (C1), every member of a trained group generated and nothing trained twice
(C2), lag within 0 … K (C3), no version freed that a generator serves; and it
fails where nothing is under way before the end.
"""

import itertools

import hypothesis
from hypothesis import strategies as st

from dora_jax.coordinator import events as ev
from tests.coordinator import world as world_lib


@st.composite
def worlds(draw, schedules=("sync", "dora")):
  schedule = draw(st.sampled_from(schedules))
  failing = draw(
    st.sets(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=5)
  )
  arguments = {
    "schedule": schedule,
    "max_staleness": 0 if schedule == "sync" else draw(st.integers(0, 3)),
    "prompts_per_batch": draw(st.integers(1, 4)),
    "group_size": draw(st.integers(1, 4)),
    "num_steps": draw(st.integers(1, 8)),
    "slots": draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)),
    "rollout_groups": draw(st.one_of(st.none(), st.integers(1, 12))),
    "num_groups": draw(st.one_of(st.none(), st.integers(1, 20))),
    "fails": lambda group_id, member: (group_id, member) in failing,
  }
  # A world is built in the test: beartype draws from `random` on the way, which
  # no strategy may do.
  return arguments


@hypothesis.settings(max_examples=120, deadline=None)
@hypothesis.given(
  worlds(), st.randoms(use_true_random=False), st.integers(0, 3)
)
def test_every_run_ends_and_accounts_for_every_group(arguments, rng, bias):
  world = world_lib.World(**arguments)

  # bias 0 is uniform; the others finish the newest or the oldest work first,
  # or nearly always the oldest, which lets stragglers pile up.
  def choices():
    while True:
      last = len(world.pending) - 1
      uniform = rng.randint(0, last)
      yield (
        uniform,
        last,
        0,
        last if rng.random() < 0.9 else uniform,
      )[bias]

  world.run(choices())
  ledger = world.coordinator.ledger
  trained = list(itertools.chain(*world.batches))
  assert len(trained) == len(set(trained)) == ledger.num_trained
  assert {g for ids in ledger.dropped.values() for g in ids} == set(
    world.dropped
  )
  # Nothing is left over: what started was trained or dropped with a reason.
  assert set(trained) | set(world.dropped) == set(range(ledger.next_group_id))
  assert set(world.dropped.values()) <= {"reward"}
  assert world.coordinator.versions_alive_max <= world.max_staleness + 1
  if world.stop == "finished":
    assert len(world.batches) == world.coordinator.newest_version
  else:
    assert world.stop == "data_exhausted"
    assert all(len(b) == len(world.batches[0]) for b in world.batches[:-1])


@hypothesis.settings(max_examples=40, deadline=None)
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
