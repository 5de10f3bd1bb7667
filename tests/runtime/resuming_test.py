"""The same command in the same workdir goes on as if nothing had happened."""

import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest

from dora_jax import checkpoint, export
from dora_jax.coordinator import events as ev
from dora_jax.runtime import build, pieces, record, resuming
from tests.runtime import tiny

_NUM_STEPS = 6
# Of these the later half is gone after the crash.
_AT = 3
_LONGEST = 200


def _completion_limit(group_id: int, member: int) -> int:
  """One of each group outlasts a train step: at its end some are open."""
  if member == group_id % tiny.config().coordinator.group_size:
    return _LONGEST
  return 2 + int(np.random.default_rng((7, group_id, member)).integers(6))


def _config(**changes) -> Any:
  settings = {
    "task__reward": "tests.runtime.tiny_rewards:digits",
    "coordinator__num_steps": _NUM_STEPS,
    "coordinator__max_staleness": 2,
    # So few that some are still to be opened in the later steps.
    "coordinator__rollout_groups": "4",
    "coordinator__balance_period_s": 0.0,
    "generator__page_size": 16,
    "generator__chunk_steps": 1,
    "generator__max_length": _LONGEST + 8,
    "generator__max_new_tokens": _LONGEST,
    "trainer__row_length": _LONGEST + 8,
    # So that params and groups of the past are asked for after the resume.
    "coordinator__reuse_ratio": 0.5,
    "trainer__recompute_logprobs": True,
    "checkpoint__every_steps": 1,
    "checkpoint__max_to_keep": _NUM_STEPS + 1,
  }
  return tiny.config(**(settings | changes))


def _crash(
  workdir: pathlib.Path, left: pathlib.Path, *, at: int = _AT
) -> pathlib.Path:
  """What a run would have left, had it been killed after a checkpoint."""
  shutil.copytree(workdir, left)
  for step in range(at + 1, _NUM_STEPS + 1):
    shutil.rmtree(left / resuming.FOLDER / str(step))
  # And while it wrote the next.
  (left / resuming.FOLDER / f"{at + 1}.orbax-checkpoint-tmp").mkdir()
  (left / "summary.json").unlink()
  return left


def _summary(workdir: pathlib.Path) -> dict[str, Any]:
  return json.loads((workdir / "summary.json").read_text())


def _lines(workdir: pathlib.Path) -> list[dict[str, float]]:
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [each for each in map(json.loads, lines) if "train/loss" in each]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
  """The workdir of a run under `dora` that nothing has cut off."""
  workdir = tmp_path_factory.mktemp("whole") / "dora"
  ran = tiny.run_and_keep(
    _config(), workdir, completion_limit=_completion_limit
  )
  assert ran.broken == [] and ran.summary["steps"] == _NUM_STEPS
  return workdir


def test_a_resumed_run_ends_with_the_bits_of_one_that_went_on(tmp_path):
  config = _config(
    coordinator__schedule="sync", coordinator__reuse_ratio=0.0, trainer__kl="k3"
  )
  assert tiny.run(config, tmp_path / "whole") == 0
  left = _crash(tmp_path / "whole", tmp_path / "left")
  assert tiny.run(config, left) == 0
  tiny.assert_same_params(
    export.restore(left, step=_NUM_STEPS),
    export.restore(tmp_path / "whole", step=_NUM_STEPS),
  )
  ours, theirs = _summary(left), _summary(tmp_path / "whole")
  assert ours["resumes"] == 1 and theirs["resumes"] == 0
  for name in ("trained_tokens", "generated", "accuracy_before", "steps"):
    assert ours[name] == theirs[name], name
  # Steps that are made again are marked; what they measured is the same.
  first = _lines(tmp_path / "whole")
  both = _lines(left)
  assert both[:_NUM_STEPS] == first
  for again, before in zip(both[_NUM_STEPS:], first[_AT:], strict=True):
    assert again["resumed"] and again["step"] == before["step"]
    assert again["train/loss"] == before["train/loss"]


@pytest.mark.parametrize(
  "changes",
  [
    {},
    pytest.param(
      {"mesh__trainer_fsdp": 2, "mesh__num_generators": 1, "mesh__lanes": 2},
      marks=pytest.mark.slow,
    ),
    pytest.param(
      {"mesh__num_generators": 3, "generator__slots": 8}, marks=pytest.mark.slow
    ),
  ],
  ids=["same", "fewer generators, another sharding", "more generators"],
)
def test_every_group_is_trained_once(whole, tmp_path, changes):
  left = _crash(whole, tmp_path / "left")
  config = _config(**changes)
  assert tiny.run(config, left) == 0
  found = _summary(left)
  assert found["steps"] == _NUM_STEPS and found["resumes"] == 1
  assert found["dropped"] == found["mixed"] == found["dropped_tokens"] == 0
  assert found["lag_max"] <= 2 and found["versions_alive_max"] <= 3
  assert found["generated_tokens"] == found["trained_tokens"]
  # The record goes through the resume: its decisions replay to the same end.
  shape = pieces.make_model_config(config, pieces.make_tokenizer(config))
  coordinator = pieces.make_coordinator(config, shape)
  _, events = record.read_events(left / record.FILE_NAME)
  events = list(events)
  commands = record.replay(coordinator, events)
  kinds = [type(event) for event, _ in events]
  assert kinds.count(ev.Resumed) == 1
  # What happened after the checkpoint has not happened.
  assert kinds.count(ev.StepDone) == _NUM_STEPS
  batches = {
    command.step: command.group_ids
    for each in commands
    for command in each
    if isinstance(command, ev.Train)
  }
  trained = [group_id for batch in batches.values() for group_id in batch]
  assert sorted(trained) == list(range(2 * _NUM_STEPS))
  extras = _extras(left, _NUM_STEPS)
  assert extras["coordinator"]["ledger"] == _json(coordinator.ledger.state())


def _json(value: Any) -> Any:
  return json.loads(json.dumps(value))


def _extras(workdir: pathlib.Path, step: int) -> dict[str, Any]:
  return checkpoint.read_extras(workdir / resuming.FOLDER, step)


def test_a_run_that_follows_a_record_goes_on_with_it(whole, tmp_path):
  # At a step's end at which groups of older versions were being generated.
  at = next(
    step
    for step in range(1, _NUM_STEPS)
    if (saved := _extras(whole, step))["coordinator"]["ledger"]["open"]
    and saved["versions"]
  )
  left = _crash(whole, tmp_path / "left", at=at)
  ran = tiny.run_and_keep(
    _config(),
    left,
    follow=whole / record.FILE_NAME,
    completion_limit=_completion_limit,
  )
  assert ran.reason == "finished" and ran.broken == []
  tiny.assert_same_params(
    export.restore(left, step=_NUM_STEPS),
    export.restore(whole, step=_NUM_STEPS),
  )
  events = [
    list(record.read_events(each / record.FILE_NAME)[1])
    for each in (left, whole)
  ]
  assert events[0] == events[1]


def test_adapters_go_on_with_the_base_that_was_saved(tmp_path):
  config = _config(trainer__lora_rank=2, trainer__lora_publish="adapter")
  first = tiny.run_and_keep(
    config, tmp_path / "whole", completion_limit=_completion_limit
  )
  assert first.reason == "finished" and first.broken == []
  # At a step's end at which older versions, hence their adapters, were needed.
  at = next(
    step
    for step in range(1, _NUM_STEPS)
    if _extras(tmp_path / "whole", step)["versions"]
  )
  left = _crash(tmp_path / "whole", tmp_path / "left", at=at)
  ran = tiny.run_and_keep(
    config,
    left,
    follow=tmp_path / "whole" / record.FILE_NAME,
    completion_limit=_completion_limit,
  )
  assert ran.reason == "finished" and ran.broken == []
  assert ran.summary["generated_tokens"] == ran.summary["trained_tokens"]
  tiny.assert_same_params(ran.params, first.params)


def test_a_run_that_has_ended_is_not_made_again(whole, tmp_path):
  left = tmp_path / "left"
  shutil.copytree(whole, left)
  before = (left / "metrics.jsonl").read_text()
  assert tiny.run(_config(), left) == 0
  assert (left / "metrics.jsonl").read_text() == before
  # But it goes on where more steps are asked for.
  assert tiny.run(_config(coordinator__num_steps=_NUM_STEPS + 1), left) == 0
  assert _summary(left)["steps"] == _NUM_STEPS + 1


def test_a_run_that_ends_where_it_was_resumed_has_nothing_to_save(
  whole, tmp_path
):
  left = _crash(whole, tmp_path / "left")
  with build.build(_config(), left) as made:
    made.runtime.resume()
    made.runtime.save()
  assert checkpoint.complete_steps(left / resuming.FOLDER)[-1] == _AT


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"coordinator__group_size": 2, "trainer__lr": 0.5},
      r"config.coordinator.group_size is 2, but 4 there; config.trainer.lr is "
      r"0.5, but 0.01 there. Change it back, or give another --workdir",
    ),
    ({"checkpoint__resume": False}, r"holds a run of 6 steps, and .*resume"),
  ],
  ids=["another config", "not asked for"],
)
def test_what_cannot_be_gone_on_with_is_refused(whole, changes, message):
  before = {p: p.stat() for p in sorted(whole.rglob("*"))}
  with pytest.raises(ValueError, match=message):
    tiny.run(_config(**changes), whole)
  assert {p: p.stat().st_mtime_ns for p in sorted(whole.rglob("*"))} == {
    path: stat.st_mtime_ns for path, stat in before.items()
  }


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
  checkpoints = checkpoint.Checkpoints(
    tmp_path / resuming.FOLDER, max_to_keep=1
  )
  checkpoints.save(2, {"x": jax.numpy.zeros(3)}, {"format": 0})
  checkpoints.close()
  with pytest.raises(ValueError, match=r"have format 0, but this code reads 1"):
    tiny.run(_config(), tmp_path)
