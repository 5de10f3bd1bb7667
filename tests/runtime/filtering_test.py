"""Filtered groups and components of rewards in real runs."""

import json
import logging

import numpy as np

from dora_jax import main
from tests.runtime import tiny

_NEVER = {"task__reward": "tests.runtime.tiny_rewards:never_solved"}


def test_a_run_that_can_learn_nothing_says_so(tmp_path, caplog):
  config = tiny.config(
    **_NEVER,
    coordinator__filter_groups=True,
    coordinator__filter_patience=3,
    evaluation__num_prompts=0,
  )
  with caplog.at_level(logging.ERROR):
    assert tiny.run(config, tmp_path) == main.EXIT_NOTHING_LEARNT
  assert "6 groups in a row" in caplog.text
  assert "config.coordinator.filter_groups" in caplog.text
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["steps"] == 0 and summary["trained_tokens"] == 0
  assert summary["dropped_tokens/none_solved"] > 0


def test_components_shape_the_reward_and_not_the_metric(tmp_path):
  config = tiny.config(
    **_NEVER,
    trainer__reward_weights__digits=0.5,
    trainer__overlong_penalty=1.0,
    trainer__overlong_buffer=1,
    coordinator__num_steps=1,
    evaluation__num_prompts=0,
  )
  assert tiny.run(config, tmp_path) == 0
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  (metrics,) = [
    each for each in map(json.loads, lines) if "train/reward_mean" in each
  ]
  # The task's own rewards are all equal: only the shaped ones teach.
  assert metrics["train/reward_mean"] == 0.25
  assert metrics["train/reward_component/task"] == 0.25
  assert 0.0 < metrics["train/reward_component/digits"] <= 0.5
  np.testing.assert_allclose(
    metrics["train/reward_component/overlong"],
    -metrics["train/truncated_share"],
  )
  assert metrics["train/grad_norm"] > 0.0
