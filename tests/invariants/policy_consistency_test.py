"""C1: every token of a trajectory is sampled by the version that began it.

A real run saves every version and samples of what it trained on. Recomputed by
the params of the version that a trajectory carries, its log-probabilities are
those recorded at sampling time; by any other version's they are not.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax import export
from dora_jax.model import attention, transformer
from dora_jax.runtime import build
from tests.runtime import tiny


def test_each_trajectory_is_its_versions_own(tmp_path):
  config = tiny.config(
    coordinator__num_steps=8,
    coordinator__max_staleness=2,
    coordinator__rollout_groups=6,
    mesh__lanes=2,
    checkpoint__every_steps=1,
    checkpoint__max_to_keep=20,
    task__reward="tests.runtime.tiny_rewards:digits",
    evaluation__num_prompts=0,
  )
  assert tiny.run(config, tmp_path) == 0
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["mixed"] == 0 and summary["lag_max"] <= 2

  shape = build.build_model_config(config, build.build_tokenizer(config))
  params = {v: export.restore(tmp_path, step=v).params for v in range(8)}
  lines = (tmp_path / "trajectories/sampled.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert len(rows) == 8 and len({row["version"] for row in rows}) > 1
  num_told_apart = 0
  for row in rows:
    errors = {
      version: _difference(shape, params[version], row) for version in params
    }
    assert errors[row["version"]] < 1e-4, (row, errors)
    others = [e for v, e in errors.items() if v != row["version"]]
    num_told_apart += min(others) > 1e-3
  # The versions differ enough for the test to mean something.
  assert num_told_apart == len(rows)


def _difference(shape, params, row) -> float:
  """Most by which recomputed and recorded log-probabilities differ."""
  tokens = np.array(row["prompt_tokens"] + row["completion_tokens"], np.int32)
  positions_BT = jnp.arange(len(tokens), dtype=jnp.int32)[None]
  hidden_BTD, _ = transformer.forward(
    params,
    shape,
    jnp.asarray(tokens)[None],
    positions_BT,
    attend=attention.causal_attention(),
  )
  logits_BTV = transformer.unembed(params, shape, hidden_BTD)
  logprobs_TV = np.asarray(jax.nn.log_softmax(logits_BTV)[0])
  start = len(row["prompt_tokens"])
  sampled = [logprobs_TV[t - 1, tokens[t]] for t in range(start, len(tokens))]
  return float(np.max(np.abs(np.array(sampled) - row["behavior_logprobs"])))
