"""A recorded run replays bitwise, and its decisions replay without a run.

Promise (design.md, section 7): a recorded schedule replays bitwise. The runs
here carry live requests from mesh to mesh, which must not show in a single bit
of what is trained (moved = unmoved), whatever happens to move in each of them.
"""

import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dora_jax.coordinator import events as ev
from dora_jax.runtime import pieces, record
from tests.runtime import tiny

_LONGEST = 300
# Moves came in 13 of 13 runs, a spill in 5 of 7; each run takes 2 seconds.
_MOST_RUNS = 10
_SAME = ("steps", "trained", "trained_tokens", "moved", "moved_tokens")


def _completion_limit(group_id: int, member: int) -> int:
  """Mostly short, some long: then steps leave stragglers, which are moved."""
  share = np.random.default_rng((7, group_id, member)).random()
  return 3 + int((_LONGEST - 3) * share**4)


def _config(**changes) -> Any:
  settings = {
    "task__reward": "tests.runtime.tiny_rewards:digits",
    "evaluation__num_prompts": 0,
    "mesh__num_generators": 3,
    "generator__page_size": 16,
    "generator__chunk_steps": 1,
    "generator__max_length": _LONGEST + 8,
    "generator__max_new_tokens": _LONGEST,
    "trainer__row_length": _LONGEST + 8,
    "trainer__rows_per_batch": 1,
    "coordinator__max_staleness": 2,
    "coordinator__num_steps": 16,
    "coordinator__rollout_groups": "8",
    "coordinator__balance_period_s": 0.02,
  }
  return tiny.config(**(settings | changes))


_run = functools.partial(tiny.run_and_keep, completion_limit=_completion_limit)


def _run_until(happened: Callable[[tiny.Ran], bool], config, make_path):
  """Runs until something has happened that depends on threads' speed.

  Returns:
    The run, and its workdir.
  """
  for _ in range(_MOST_RUNS):
    path = make_path()
    ran = _run(config, path)
    assert ran.reason == "finished" and ran.broken == []
    found = ran.summary
    assert found["mixed"] == found["dropped"] == found["reprefilled"] == 0
    assert found["lag_max"] <= 2
    assert found["moved"] == sum(counters.moved_in for counters in ran.counters)
    if happened(ran):
      return ran, path
  raise AssertionError(f"It has happened in none of {_MOST_RUNS} runs.")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[tiny.Ran, pathlib.Path]:
  """A run in which live requests have moved from mesh to mesh."""
  return _run_until(
    lambda ran: ran.summary["moved"] > 0,
    _config(),
    lambda: tmp_path_factory.mktemp("recorded"),
  )


def _steps(path: pathlib.Path) -> list[dict[str, float]]:
  """What each step measured of what it trained on."""
  lines = (path / "metrics.jsonl").read_text().splitlines()
  return [
    {k: v for k, v in step.items() if k.startswith("train/") and k[-2:] != "_s"}
    for step in map(json.loads, lines)
    if "train/loss" in step
  ]


@pytest.mark.parametrize(
  "changes",
  [
    {},
    # Other work on the first mesh, and faster rewards: another timing.
    {
      "evaluation__num_prompts": 4,
      "evaluation__every_steps": 1,
      "task__reward_workers": 2,
    },
  ],
  ids=["same settings", "other timing"],
)
def test_a_run_that_follows_a_record_ends_with_the_same_bits(
  recorded, tmp_path, changes
):
  first, path = recorded
  second = _run(_config(**changes), tmp_path, follow=path / record.FILE_NAME)
  assert second.reason == "finished" and second.broken == []
  tiny.assert_same_params(second.params, first.params)
  assert _steps(tmp_path) == _steps(path)
  for name in _SAME:
    assert second.summary[name] == first.summary[name], name
  assert second.coordinator.snapshot() == first.coordinator.snapshot()
  # What it records itself is what it has followed.
  events = [
    list(record.read_events(each / record.FILE_NAME)[1])
    for each in (path, tmp_path)
  ]
  assert events[0] == events[1]


@pytest.mark.slow
def test_requests_that_are_spilled_end_with_the_same_bits(
  tmp_path, tmp_path_factory
):
  lanes = {"mesh__num_generators": 1, "mesh__lanes": 3}
  # No more pages than the longest request needs: versions are in each other's
  # way, and newer ones make room.
  crowded, path = _run_until(
    lambda ran: sum(counters.spilled for counters in ran.counters) > 0,
    _config(**lanes, generator__num_pages=21),
    lambda: tmp_path_factory.mktemp("crowded"),
  )
  roomy = _run(_config(**lanes), tmp_path, follow=path / record.FILE_NAME)
  assert not any(counters.spilled for counters in roomy.counters)
  tiny.assert_same_params(roomy.params, crowded.params)
  assert _steps(tmp_path) == _steps(path)


def test_the_decisions_of_a_record_replay_without_a_run(recorded):
  first, path = recorded
  config = _config()
  shape = pieces.make_model_config(config, pieces.make_tokenizer(config))
  coordinator = pieces.make_coordinator(config, shape)
  start_s = time.perf_counter()
  _, events = record.read_events(path / record.FILE_NAME)
  commands = record.replay(coordinator, events)
  seconds = time.perf_counter() - start_s
  assert coordinator.snapshot() == first.coordinator.snapshot()
  trains = [c for step in commands for c in step if isinstance(c, ev.Train)]
  assert [train.step for train in trains] == list(range(16))
  # Without model and clocks a record is over long before its run.
  assert seconds < first.summary["seconds"]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {
        "coordinator__schedule": "partial_rollout",
        "trainer__proximal": "current",
        "trainer__correction": "tis",
      },
      "config.coordinator.schedule 'partial_rollout': at which token",
    ),
    (
      {"coordinator__group_size": 2, "trainer__lr": 0.5},
      r"config.coordinator.group_size is 2, but 4 there, and 1 more",
    ),
    ({"mesh__num_generators": 2}, "config.mesh.num_generators is 2, but 3"),
    ({"task__params": {"max_term": 6}}, "config.task.params.max_term is 6"),
  ],
  ids=["partial_rollout", "group_size", "num_generators", "params"],
)
def test_a_record_of_another_config_is_refused(
  recorded, tmp_path, changes, message
):
  with pytest.raises(ValueError, match=message):
    _run(_config(**changes), tmp_path, follow=recorded[1] / record.FILE_NAME)


def test_a_run_does_not_overwrite_the_record_that_it_follows(recorded):
  _, path = recorded
  names = (record.FILE_NAME, "config.json", "summary.json")
  before = [(path / name).read_bytes() for name in names]
  with pytest.raises(ValueError, match=r"own record: give another --workdir"):
    _run(_config(seed=9), path, follow=path / record.FILE_NAME)
  assert [(path / name).read_bytes() for name in names] == before
