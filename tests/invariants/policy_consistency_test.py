"""C1: every token of a trajectory is sampled by the version that began it.

A real run saves every version and samples of what it trained on. Recomputed by
the params of the version that a trajectory carries, its log-probabilities are
those recorded at sampling time; by any other version's they are not.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax import export
from dora_jax.model import attention, transformer
from dora_jax.runtime import pieces
from tests.runtime import tiny


def test_each_trajectory_is_its_versions_own(tmp_path):
  config = tiny.config(
    coordinator__num_steps=8,
    coordinator__max_staleness=2,
    coordinator__rollout_groups="6",
    mesh__lanes=2,
    checkpoint__every_steps=1,
    checkpoint__max_to_keep=20,
    task__reward="tests.runtime.tiny_rewards:digits",
    evaluation__num_prompts=0,
  )
  assert tiny.run(config, tmp_path) == 0
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["mixed"] == 0 and summary["lag_max"] <= 2

  shape = pieces.make_model_config(config, pieces.make_tokenizer(config))
  params = {v: export.restore(tmp_path, step=v).params for v in range(8)}
  lines = (tmp_path / "trajectories/sampled.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert len(rows) == 8 and len({row["version"] for row in rows}) > 1
  errors = {
    version: _differences(shape, params[version], rows) for version in params
  }
  for index, row in enumerate(rows):
    assert errors[row["version"]][index] < 1e-4, (row, errors)
    others = [e[index] for v, e in errors.items() if v != row["version"]]
    # The versions differ enough for the test to mean something.
    assert min(others) > 1e-3, (row, errors)


def _differences(shape, params, rows) -> list[float]:
  """Most by which recomputed and recorded log-probabilities differ, a row."""
  length = max(
    len(row["prompt_tokens"]) + len(row["completion_tokens"]) for row in rows
  )
  tokens_BT = np.zeros((len(rows), length), np.int32)
  for index, row in enumerate(rows):
    tokens = row["prompt_tokens"] + row["completion_tokens"]
    tokens_BT[index, : len(tokens)] = tokens
  logprobs_BTV = np.asarray(_logprobs(params, shape, tokens_BT))
  differences = []
  for index, row in enumerate(rows):
    start = len(row["prompt_tokens"])
    places = np.arange(start, start + len(row["completion_tokens"]))
    sampled = logprobs_BTV[index, places - 1, tokens_BT[index, places]]
    differences.append(
      float(np.max(np.abs(sampled - np.array(row["behavior_logprobs"]))))
    )
  return differences


@functools.partial(jax.jit, static_argnames="shape")
def _logprobs(params, shape, tokens_BT):
  positions_BT = jnp.broadcast_to(
    jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape
  )
  hidden_BTD, _ = transformer.forward(
    params,
    shape,
    tokens_BT,
    positions_BT,
    attend=attention.causal_attention(),
  )
  return jax.nn.log_softmax(transformer.unembed(params, shape, hidden_BTD))
