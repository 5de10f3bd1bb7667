"""A step whose weights do not reach the generators is not passed over."""

import dataclasses
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dora_jax.runtime import build, local
from tests.runtime import tiny


def _config(**changes) -> Any:
  return tiny.config(
    task__reward="tests.runtime.tiny_rewards:digits",
    evaluation__num_prompts=0,
    **changes,
  )


def test_weights_that_do_not_move_with_the_trainers_stop_the_run(tmp_path):
  with build.build(_config(), tmp_path) as made:
    # As if each publish took the weights of the beginning.
    first = jax.tree.map(jnp.copy, made.trainer.params())
    trainer: Any = made.trainer
    trainer.params = lambda: first
    made.trainer_part.publish()
    with pytest.raises(
      local.PartFailed,
      match=r"trainer failed \(publishing version 1\): .*Version 1 .* 0 of 11 "
      r"arrays changed, after a step of gradient norm [\d.]+ at "
      r"config.trainer.lr 0.01: what is",
    ):
      made.runtime.run()
    # The step was made, and is kept; in the middle of one nothing is.
    assert made.trainer_part.usable_version() == 1
    assert "version 1 is the last" in made.runtime.save_last_good()
    jax.tree.leaves(trainer.state())[0].delete()
    assert made.trainer_part.usable_version() is None
    assert "middle of a step" in made.runtime.save_last_good()
  assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]
  (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
  measured = json.loads(line)
  assert measured["step"] == 1 and measured["train/lag_mean"] == 0.0


def test_a_step_of_which_nobody_heard_any_more_is_kept_whole(tmp_path):
  with build.build(_config(), tmp_path) as made:
    made.trainer_part.publish()
    runtime: Any = made.runtime

    def fail(message):
      raise OSError(f"no ear for version {message.version}")

    runtime._hear_step = fail
    with pytest.raises(OSError, match="no ear for version 1"):
      runtime.run()
    assert "version 1 is the last" in runtime.save_last_good()
  (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
  measured = json.loads(line)
  assert measured["step"] == 1 and measured["weights/publish_s"] > 0


def test_a_publish_that_fails_is_tried_once_more(tmp_path):
  with build.build(_config(), tmp_path) as made:
    made.trainer_part.publish()
    store = made.trainer_part._publisher._store
    convert = store._convert
    fails = itertools.chain([True, False], itertools.repeat(True))

    def fail(params):
      if next(fails):
        raise jax.errors.JaxRuntimeError("INTERNAL: the link is down")
      return convert(params)

    store._convert = fail
    made.trainer.version = 1
    assert made.trainer_part.publish().version == 1
    made.trainer.version = 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="the link is down"):
      made.trainer_part.publish()
    # Those before are served as they were.
    assert store.versions() == [0, 1]


def test_steps_that_are_rounded_off_are_counted(tmp_path):
  config = _config(
    generator__dtype="bfloat16",
    model__compute_dtype="bfloat16",
    runtime__canary_tolerance=1.0,
    trainer__lr=1e-12,
  )
  assert tiny.run_and_keep(config, tmp_path).broken == []
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  steps = [json.loads(line) for line in lines]
  assert [step["weights/unchanged"] for step in steps] == [1, 2, 3]
  assert [step["weights/arrays_changed"] for step in steps] == [0, 0, 0]


def _spoil(trainer: Any, times: int) -> None:
  """Lets the first steps of the real trainer meet a param that is infinite."""
  train, left = trainer.train, iter(range(times))

  def put(embed):
    state = trainer._policy.state
    trainer._policy.state = dataclasses.replace(
      state, params=state.params | {"embed": embed}
    )

  def train_spoilt(groups):
    if next(left, None) is None:
      return train(groups)
    embed = trainer._policy.state.params["embed"]
    put(embed.at[:, 0].set(jnp.inf))
    metrics = train(groups)
    put(embed)
    return metrics

  trainer.train = train_spoilt


def test_a_step_that_is_not_finite_is_made_of_other_groups(tmp_path):
  with build.build(_config(), tmp_path) as made:
    made.trainer_part.publish()
    _spoil(made.trainer, 2)
    assert made.runtime.run() == "finished"
    assert made.results.summarise(extra={}, command="test") == []
    assert made.trainer_part._publisher._store.versions()[-1] == 3
  summary = json.loads((tmp_path / "summary.json").read_text())
  # Two batches of two groups of four came to nothing, three were trained.
  assert (summary["steps"], summary["dropped"], summary["trained"]) == (
    3,
    16,
    24,
  )
  assert summary["lag_max"] <= 1
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  steps = [json.loads(line) for line in lines]
  assert [step["step"] for step in steps] == [1, 2, 3]
  assert {step["train/nonfinite_steps"] for step in steps} == {2.0}


def test_steps_that_never_come_to_anything_end_the_run(tmp_path):
  config = _config(coordinator__num_steps=5)
  with build.build(config, tmp_path) as made:
    made.trainer_part.publish()
    _spoil(made.trainer, 100)
    assert made.runtime.run() == "steps_skipped"
    assert made.trainer.version == 0
