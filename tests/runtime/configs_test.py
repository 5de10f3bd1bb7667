"""Every named config is valid; the one for accelerators runs, made small."""

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dora_jax import config as config_lib
from dora_jax import main
from dora_jax.model import attention, families, huggingface, transformer

_ROOT = pathlib.Path(__file__).parents[2]
_CONFIGS = sorted(
  path
  for path in (_ROOT / "configs").glob("*.py")
  if path.name not in ("common.py", "__init__.py")
)
_GSM8K = _ROOT / "configs" / "gsm8k_qwen3_0p6b.py"
_DATA = _ROOT.parent / "shared" / "data"
# config.json of https://huggingface.co/Qwen/Qwen3-0.6B.
_QWEN3_0P6B = {
  "architectures": ["Qwen3ForCausalLM"],
  "model_type": "qwen3",
  "hidden_size": 1024,
  "intermediate_size": 3072,
  "num_hidden_layers": 28,
  "num_attention_heads": 16,
  "num_key_value_heads": 8,
  "head_dim": 128,
  "vocab_size": 151936,
  "rope_theta": 1000000,
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": True,
  "max_position_embeddings": 40960,
  "attention_bias": False,
  "hidden_act": "silu",
}


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_valid_with_the_devices_that_it_needs(path):
  config: Any = config_lib.load(path)
  mesh = config.mesh
  needed = mesh.trainer_fsdp * mesh.trainer_sequence * mesh.trainer_tensor
  if not mesh.colocated:
    needed += mesh.num_generators * mesh.generator_tensor
  assert mesh.host_devices in (0, needed)
  config_lib.validate(config, num_devices=needed)
  with pytest.raises(ValueError, match=f"need {needed} devices"):
    config_lib.validate(config, num_devices=needed - 1)


def test_gsm8k_builds_the_shape_of_qwen3_0p6b(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(_QWEN3_0P6B))
  shape = huggingface.load_config(tmp_path)
  config: Any = config_lib.load(_GSM8K)
  config_lib.check_heads(
    config, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads
  )
  assert config.generator.max_length <= shape.max_positions
  params = transformer.abstract_params(
    shape, dtype=jnp.dtype(config.model.compute_dtype)
  )
  count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
  assert 0.55e9 < count < 0.65e9

  def logits(params, tokens_BT, positions_BT):
    hidden_BTD, _ = transformer.forward(
      params,
      shape,
      tokens_BT,
      positions_BT,
      attend=attention.causal_attention(),
    )
    return transformer.unembed(params, shape, hidden_BTD)

  rows = jax.ShapeDtypeStruct((2, 16), jnp.int32)
  logits_BTV = jax.eval_shape(logits, params, rows, rows)
  assert logits_BTV.shape == (2, 16, 151936)
  assert logits_BTV.dtype == jnp.float32


def make_small(config: Any, model_folder: pathlib.Path) -> None:
  """Leaves of gsm8k what a laptop can do, and a tiny random Qwen3."""
  shape = dataclasses.replace(
    families.from_hf(_QWEN3_0P6B),
    width=32,
    mlp_width=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_width=16,
  )
  params = transformer.init_params(shape, key=jax.random.key(0))
  huggingface.save_params(model_folder, params, shape, torch_dtype="bfloat16")
  config.model.folder = str(model_folder)
  config.tokenizer.folder = str(_DATA / "tokenizers" / "qwen3")
  config.task.path = str(_DATA / "gsm8k" / "train.jsonl")
  config.task.heldout_path = str(_DATA / "gsm8k" / "test.jsonl")
  config.task.size = 40
  config.task.num_heldout = 2
  config.task.max_prompt_tokens = 120
  config.task.reward_workers = 1
  config.task.reward_timeout_s = 60.0
  config.generator.slots = 4
  config.generator.max_length = 128
  config.generator.max_new_tokens = 8
  config.generator.chunk_steps = 4
  config.coordinator.prompts_per_batch = 2
  config.coordinator.group_size = 2
  config.coordinator.num_steps = 2
  config.trainer.row_length = 128
  config.trainer.rows_per_batch = 2
  config.trainer.logprob_chunk = 64
  config.evaluation.num_prompts = 2


@pytest.mark.slow
def test_gsm8k_takes_its_first_steps(tmp_path):
  for needed in ("tokenizers/qwen3", "gsm8k/train.jsonl"):
    if not (_DATA / needed).exists():
      pytest.skip(f"{_DATA / needed} is not here")
  config: Any = config_lib.load(_GSM8K)
  make_small(config, tmp_path / "model")
  config_lib.validate(config, num_devices=len(jax.devices()))
  workdir = tmp_path / "workdir"
  assert main.run(config, workdir, command="test") == 0
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["steps"] == 2
  assert summary["mixed"] == summary["dropped"] == 0
  lines = (workdir / "trajectories/sampled.jsonl").read_text().splitlines()
  for line in map(json.loads, lines):
    # The chat template's user turn, the braces of \boxed{} as they are.
    assert line["prompt"].startswith("<|im_start|>user\n")
    assert "final answer within \\boxed{}.<|im_end|>" in line["prompt"]
    assert line["prompt"].endswith("<|im_start|>assistant\n")
    assert "{question}" not in line["prompt"]
    assert 1 <= len(line["completion_tokens"]) <= 8
    float(line["answer"])
