"""C2: none of a group's members is abandoned, and none is trained twice."""

import collections
import json

import hypothesis
from hypothesis import strategies as st

from dora_jax.coordinator import events as ev
from tests.coordinator import driving
from tests.coordinator import world as world_lib
from tests.runtime import tiny


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
  rng=st.randoms(use_true_random=False),
  k=st.integers(0, 3),
  group_size=st.integers(1, 5),
  slots=st.lists(st.integers(1, 7), min_size=1, max_size=3),
)
def test_whole_groups_in_the_order_of_their_versions(rng, k, group_size, slots):
  world = world_lib.World(
    max_staleness=k,
    prompts_per_batch=3,
    group_size=group_size,
    num_steps=6,
    slots=slots,
  )
  finished: dict[int, set[int]] = {}

  def choices():
    while True:
      choice = rng.randint(0, len(world.pending) - 1)
      event = world.pending[choice]
      if isinstance(event, ev.Scored):
        finished.setdefault(event.group_id, set()).add(event.member)
      yield choice

  world.run(choices())
  trained = [g for batch in world.batches for g in batch]
  # Every group that started is trained, whole, once; batches are full.
  assert sorted(trained) == list(range(18))
  assert all(finished[g] == set(range(group_size)) for g in trained)
  assert [len(batch) for batch in world.batches] == [3] * 6
  # Oldest first: within a batch, by version and then by dispatch.
  for batch in world.batches:
    keys = [(world.versions[g], g) for g in batch]
    assert keys == sorted(keys)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
  rng=st.randoms(use_true_random=False),
  pace=st.sampled_from(driving.PACES),
)
def test_no_loss_failed_move_or_pause_costs_a_trajectory(rng, pace):
  world = driving.roomy(rng, num_steps=4, move_fails=lambda: rng.random() < 0.3)
  driving.drive(world, rng, pace, fault_rate=0.1, faults=driving.HARMLESS)
  trained = sorted(g for batch in world.batches for g in batch)
  assert trained == list(range(4 * world.prompts_per_batch))
  # Of each, every member was generated to its end, and counted once.
  ledger = world.coordinator.ledger
  assert ledger.num_generated == len(trained) * world.group_size
  assert ledger.tokens.trained == ledger.tokens.generated
  assert ledger.tokens.trained == sum(
    world_lib.length(g, m) for g in trained for m in range(world.group_size)
  )


def test_a_reward_that_raises_is_counted_and_refilled_by_exactly_one(tmp_path):
  config = tiny.config(
    task__reward="tests.runtime.tiny_rewards:picky",
    evaluation__num_prompts=0,
    task__num_epochs=0,
  )
  # It is no promise kept: dropped trajectories end the run with status 1.
  assert tiny.run(config, tmp_path) == 1
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["steps"] == 3
  lags = sum(v for k, v in summary.items() if k.startswith("lag_count/"))
  assert lags == 3 * 2 * 4  # full batches all the same
  dropped = summary["dropped"]
  assert dropped > 0 and dropped % 4 == 0
  lines = (tmp_path / "trajectories/sampled.jsonl").read_text().splitlines()
  assert all(int(json.loads(line)["answer"]) % 2 == 0 for line in lines)
  check_quarantine(tmp_path, dropped)


def check_quarantine(workdir, dropped):
  """Each member of a group that was dropped is there once, with its reason."""
  text = (workdir / "quarantine.jsonl").read_text()
  lines = [json.loads(line) for line in text.splitlines()]
  members = collections.Counter((x["group_id"], x["member"]) for x in lines)
  assert max(members.values()) == 1
  # What was still to be scored at the end was not dropped for its reward.
  assert len({group_id for group_id, _ in members}) >= dropped / 4
  for line in lines:
    assert int(line["answer"]) % 2 and line["purpose"] == "rollout"
    assert line["error"] == f"ValueError: cannot judge {line['answer']}"
    assert line["num_tries"] == 2 and line["completion"] is not None
    assert line["prompt"].endswith("=")
