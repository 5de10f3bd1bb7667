"""Real runs of every schedule: its promises hold, what it breaks is counted.

Promise (design.md, section 2): sync, one_step_off, partial_rollout, replication
and dora are strategies of one machine, and one ledger counts for all of them
mixed, dropped and re-prefilled tokens. Each run here ends with its data, when
nothing is in flight any more, so that its tokens must add up to the last one.
"""

from typing import Any

import pytest

from tests.runtime import tiny

_LONG = 240
# Of 25 groups one in four has a member that takes longer than several steps.
_NUM_GROUPS, _GROUP_SIZE = 25, 4


def _completion_limit(group_id: int, member: int) -> int:
  return _LONG if group_id % 4 == 1 and member == 2 else 3


def _config(**changes) -> Any:
  """All 25 sums of two terms up to 4, once."""
  return tiny.config(
    task__params={"max_term": 4},
    task__num_heldout=0,
    task__num_epochs=1,
    task__reward="tests.runtime.tiny_rewards:digits",
    evaluation__num_prompts=0,
    generator__page_size=16,
    generator__chunk_steps=1,
    generator__max_length=_LONG + 8,
    generator__max_new_tokens=_LONG,
    trainer__row_length=_LONG + 8,
    coordinator__group_size=_GROUP_SIZE,
    coordinator__num_steps=2 * _NUM_GROUPS,
    coordinator__balance_period_s=0.05,
    **changes,
  )


def _run(path, **changes) -> tiny.Ran:
  """Runs until the data ends; checks what holds for every schedule."""
  ran = tiny.run_and_keep(
    _config(**changes), path, completion_limit=_completion_limit
  )
  assert ran.reason == "data_exhausted"
  assert ran.broken == []
  found = ran.summary
  assert not ran.coordinator.snapshot()["placement"]["cancelling"]
  for name in ("open", "ready", "in_batch", "in_flight"):
    assert found[f"{name}_tokens"] == 0, name
  assert found["generated_tokens"] == ran.num_decoded
  placed = found["trained_tokens"] + found["dropped_tokens"]
  assert found["generated_tokens"] == placed
  assert found["reprefilled"] == sum(
    counters.reprefilled_tokens for counters in ran.counters
  )
  assert found["moved"] == sum(counters.moved_in for counters in ran.counters)
  assert found["trained"] + found["dropped"] == _NUM_GROUPS * _GROUP_SIZE
  return ran


@pytest.mark.parametrize(
  ("schedule", "max_staleness", "bound"),
  [("dora", 2, 2), ("dora", 0, 0), ("sync", 3, 0), ("one_step_off", 3, 1)],
)
def test_nothing_is_mixed_dropped_or_prefilled_again(
  tmp_path, schedule, max_staleness, bound
):
  found = _run(
    tmp_path,
    coordinator__schedule=schedule,
    coordinator__max_staleness=max_staleness,
  ).summary
  assert found["mixed"] == found["dropped"] == found["reprefilled"] == 0
  assert found["regenerated"] == found["dropped_tokens"] == 0
  assert found["steps"] == -(-_NUM_GROUPS // 2)
  assert found["lag_max"] <= bound
  assert found["versions_alive_max"] <= bound + 1
  lengths = [
    _completion_limit(group_id, member)
    for group_id in range(_NUM_GROUPS)
    for member in range(_GROUP_SIZE)
  ]
  assert found["trained_tokens"] == sum(lengths)


def test_partial_rollout_counts_what_it_mixes_and_prefills_again(tmp_path):
  found = _run(
    tmp_path,
    coordinator__schedule="partial_rollout",
    trainer__proximal="current",
    trainer__correction="tis",
  ).summary
  # The long ones outlast a step; each new version computes their KV anew.
  assert found["reprefilled"] >= found["mixed"] > 0
  assert found["dropped"] == found["moved"] == found["regenerated"] == 0
  assert found["lag_max"] <= 1


def test_replication_counts_what_it_drops_by_length(tmp_path):
  found = _run(
    tmp_path,
    coordinator__schedule="replication",
    coordinator__oversample=1.5,
  ).summary
  # 3 groups start for 2 that are trained; the last one has no others.
  assert found["dropped"] == 8 * _GROUP_SIZE
  assert found["mixed"] == found["reprefilled"] == found["lag_max"] == 0
  assert found["dropped_tokens/oversampled"] == found["dropped_tokens"]
  by_length = [v for k, v in found.items() if k.startswith("dropped_shorter")]
  assert sum(by_length) <= found["dropped"]
  # The bias for which it is counted: what is dropped is the longest.
  assert found["length_trained_mean"] < found["length_generated_mean"]


def test_dora_that_evicts_counts_what_it_generates_anew(tmp_path):
  found = _run(tmp_path, coordinator__evict=True).summary
  assert found["regenerated"] > 0
  assert found["dropped_tokens/evicted"] == found["dropped_tokens"] > 0
  # No group is lost by it: all were trained, some after a second start.
  assert found["mixed"] == found["dropped"] == found["reprefilled"] == 0
  assert found["trained"] == _NUM_GROUPS * _GROUP_SIZE
  assert found["lag_max"] <= 1
