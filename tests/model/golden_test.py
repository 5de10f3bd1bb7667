"""Logits against a table, and against transformers' own where torch is here.

The weights and tokens follow from a formula (conftest.py), so the table needs
no checkpoint; the parity test holds transformers to the same table.
"""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.model import attention, huggingface, transformer

# {family: logits of token 0, 7, 14, … at the first, middle and last position}.
_GOLDEN = json.loads(
  pathlib.Path(__file__).with_name("golden_logits.json").read_text()
)
_STORIES = (
  pathlib.Path(__file__).parents[3] / "shared" / "data" / "stories260K" / "hf"
)
# Beyond llama3_scaled's original 32 positions.
_NUM_TOKENS = 60
_TOKENS_BT = (np.arange(_NUM_TOKENS, dtype=np.int32) ** 2 % 47)[None]


@functools.partial(
  jax.jit,
  static_argnames="config",
  compiler_options={"xla_backend_optimization_level": 0},
)
def _logits(params, config, tokens_BT):
  positions_BT = jnp.arange(tokens_BT.shape[1])[None]
  hidden_BTD, _ = transformer.forward(
    params,
    config,
    tokens_BT,
    positions_BT,
    attend=attention.causal_attention(),
  )
  return transformer.unembed(params, config, hidden_BTD)


def _pick(logits_BTV):
  return np.asarray(logits_BTV)[0, [0, _NUM_TOKENS // 2, -1], ::7]


def _load_in_torch(folder) -> Any:
  pytest.importorskip("torch", reason="torch is not installed")
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, attn_implementation="eager"
  )
  return model.eval()


def test_logits_equal_the_table(family, config, params):
  np.testing.assert_allclose(
    _pick(_logits(params, config, _TOKENS_BT)), _GOLDEN[family], atol=1e-4
  )


@pytest.mark.parity
def test_exported_logits_equal_transformers(tmp_path, family, config, params):
  huggingface.save_params(tmp_path, params, config, torch_dtype="float32")
  model = _load_in_torch(tmp_path)
  torch = pytest.importorskip("torch")

  with torch.no_grad():
    theirs = model(torch.tensor(_TOKENS_BT, dtype=torch.long)).logits.numpy()
  ours = _logits(params, config, _TOKENS_BT)
  np.testing.assert_allclose(ours, theirs, atol=1e-4)
  np.testing.assert_allclose(_pick(theirs), _GOLDEN[family], atol=1e-4)


@pytest.mark.parity
def test_exported_story_is_told_alike_by_transformers(tmp_path):
  if not _STORIES.exists():
    pytest.skip(f"{_STORIES} is not here")
  config = huggingface.load_config(_STORIES)
  params = huggingface.load_params(_STORIES, config, dtype=jnp.float32)
  huggingface.save_params(
    tmp_path,
    params,
    config,
    torch_dtype="float32",
    source_folder=_STORIES,
  )
  model = _load_in_torch(tmp_path)
  torch = pytest.importorskip("torch")

  with torch.no_grad():
    told = model.generate(
      torch.tensor([[1]]), max_new_tokens=40, do_sample=False
    ).numpy()
  logits = _logits(params, config, told.astype(np.int32))
  assert np.argmax(logits[0, :-1], axis=-1).tolist() == told[0, 1:].tolist()
