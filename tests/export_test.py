"""An exported run is its checkpoint, for us and for transformers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax import export
from dora_jax.model import attention, huggingface, transformer
from tests.runtime import tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """The workdir of a run of one step, and the folder of its export.

  With all that a checkpoint may hold besides params: adapters and their base, a
  critic, an average.
  """
  workdir = tmp_path_factory.mktemp("run")
  config = tiny.config(
    coordinator__num_steps=1,
    task__reward="tests.runtime.tiny_rewards:digits",
    evaluation__num_prompts=0,
    checkpoint__every_steps=1,
    trainer__lora_rank=2,
    trainer__lora_targets=("query", "down"),
    trainer__lora_publish="adapter",
    trainer__advantage="gae",
    trainer__ema_decay=0.5,
  )
  assert tiny.run(config, workdir) == 0
  out = workdir / "exported"
  export.export(workdir, out, step=None, dtype="float32", averaged=False)
  return workdir, out


def _load(out):
  shape = huggingface.load_config(out)
  return huggingface.load_params(out, shape, dtype=jnp.float32)


def _merged(state, pairs):
  """By another way than the trainer's; alpha is 16."""
  expected = jax.device_get(state.frozen)
  for name, letters in (
    ("query", "LDR,LRKGH->LDKGH"),
    ("down", "LFR,LRD->LFD"),
  ):
    pair = pairs["blocks"][name]
    added = np.einsum(letters, pair["a"], pair["b"])
    expected["blocks"][name] = expected["blocks"][name] + 8.0 * added
  return expected


def _assert_close(found, expected):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected
  )


def test_what_is_exported_is_the_checkpoint(folders):
  workdir, out = folders
  state = export.restore(workdir, step=1)
  _assert_close(_load(out), _merged(state, state.params))


def test_the_average_is_exported_where_asked(folders, tmp_path):
  workdir, _ = folders
  first, last = (export.restore(workdir, step=step) for step in (0, 1))
  export.export(workdir, tmp_path, step=1, dtype="float32", averaged=True)
  average = jax.tree.map(
    lambda x, y: 0.5 * x + 0.5 * y, first.params, last.params
  )
  _assert_close(_load(tmp_path), _merged(last, average))


def test_a_step_that_was_not_kept_is_named(folders, tmp_path):
  workdir, _ = folders
  with pytest.raises(FileNotFoundError, match=r"7"):
    export.export(workdir, tmp_path, step=7, dtype="float32", averaged=False)


@pytest.mark.parity
def test_transformers_gives_the_same_logits(folders):
  _, out = folders
  torch = pytest.importorskip("torch", reason="torch is not installed")
  import transformers

  shape = huggingface.load_config(out)
  tokens_BT = np.array([[3, 5, 2, 9, 4, 1, 7], [1, 1, 8, 2, 2, 6, 3]], np.int32)
  positions_BT = jnp.tile(jnp.arange(7, dtype=jnp.int32), (2, 1))
  params = _load(out)
  hidden_BTD, _ = transformer.forward(
    params,
    shape,
    tokens_BT,
    positions_BT,
    attend=attention.causal_attention(),
  )
  ours_BTV = transformer.unembed(params, shape, hidden_BTD)
  model: Any = transformers.AutoModelForCausalLM.from_pretrained(
    out, attn_implementation="eager"
  )
  with torch.no_grad():
    theirs_BTV = model.eval()(torch.tensor(tokens_BT, dtype=torch.long)).logits
  np.testing.assert_allclose(ours_BTV, theirs_BTV.numpy(), atol=1e-4)
