"""Runs that train adapters, which generators get merged or alone."""

import json
from typing import Any

import jax
import numpy as np
import pytest

from dora_jax import config as config_lib
from dora_jax.runtime import pieces, weight_bytes
from tests.runtime import tiny

_NUM_STEPS = 3


def _config(**changes) -> Any:
  settings = {
    "task__reward": "tests.runtime.tiny_rewards:digits",
    # So many that two devices can share them.
    "tokenizer__alphabet": "0123456789+=- ",
    "coordinator__schedule": "sync",
    "coordinator__num_steps": _NUM_STEPS,
    "trainer__lora_rank": 2,
    "trainer__lora_targets": ("query", "key", "output", "down"),
    "trainer__lora_publish": "adapter",
  }
  return tiny.config(**(settings | changes))


def _check(ran: tiny.Ran) -> None:
  """Nothing was broken, and every sampled token was trained on."""
  assert ran.reason == "finished" and ran.broken == []
  found = ran.summary
  assert found["steps"] == _NUM_STEPS and found["dropped"] == 0
  assert found["generated_tokens"] == found["trained_tokens"] > 0


def test_a_run_goes_as_where_all_params_are_published(tmp_path):
  merged = tiny.run_and_keep(
    _config(trainer__lora_publish="merged"), tmp_path / "merged"
  )
  # Two devices need the one KV head twice, and two lanes share a base.
  config = _config(
    mesh__num_generators=1, mesh__generator_tensor=2, mesh__lanes=2
  )
  ran = tiny.run_and_keep(config, tmp_path / "alone")
  _check(ran)
  for name in ("trained_tokens", "accuracy_before"):
    assert ran.summary[name] == merged.summary[name]
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4),
    ran.params,
    merged.params,
  )
  # Rank 2 times inputs and outputs: 32 of the MLP, 8 of each copy of the KV
  # head, else 16.
  num_weights = 2 * ((16 + 16) + (16 + 2 * 8) + (16 + 16) + (32 + 16))
  lines = (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()
  steps = [each for each in map(json.loads, lines) if "train/loss" in each]
  assert len(steps) == _NUM_STEPS
  for step in steps:
    assert step["weights/publish_bytes"] == 4 * num_weights
    # Of weights in full, engine and trainer agree.
    assert step["train/mismatch_kl_k3"] < 1e-9


def test_the_base_may_be_rounded(tmp_path):
  config = _config(
    generator__weights_dtype="int8",
    generator__dtype="bfloat16",
    coordinator__schedule="partial_rollout",
    trainer__proximal="current",
    trainer__correction="tis",
    runtime__canary_tolerance=0.3,
    mesh__colocated=True,
    mesh__num_generators=1,
  )
  _check(tiny.run_and_keep(config, tmp_path))


def test_a_version_weighs_what_its_adapters_do():
  config = _config(generator__dtype="bfloat16")
  shape = pieces.make_model_config(config, pieces.make_tokenizer(config))
  trained = pieces.make_trained(config, shape)
  alone = weight_bytes.count(config, trained)
  config.trainer.lora_publish = "merged"
  whole = weight_bytes.count(config, trained)
  assert alone.base == whole.version and whole.base == 0
  assert alone.version == 4 * weight_bytes.count_weights(trained)
  assert alone.version < whole.version
  # Three versions on two devices: halves of the base, and all of the adapters.
  found = alone.on_device(num_versions=3, num_devices=2)
  assert found == 3 * alone.version + whole.version // 2
  found = whole.on_device(num_versions=3, num_devices=2)
  assert found == 3 * whole.version // 2


def test_without_adapters_there_is_nothing_to_publish_alone():
  config = _config(trainer__lora_rank=0)
  with pytest.raises(
    ValueError,
    match=r"lora_publish is 'adapter' but must be \"merged\" .*lora_rank is 0",
  ):
    config_lib.validate(config, num_devices=8)
