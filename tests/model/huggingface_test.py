"""Checkpoints: round trips bit by bit, and each way of being wrong."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from dora_jax.model import huggingface, tensor_names, transformer
from dora_jax.parallel import axes, meshes


def _assert_same(tree, other):
  jax.tree.map(np.testing.assert_array_equal, tree, other)


def _edit(folder, change):
  """Applies `change` to the dict of a single-file checkpoint's tensors."""
  path = folder / "model.safetensors"
  tensors = safetensors_numpy.load_file(path)
  change(tensors)
  safetensors_numpy.save_file(tensors, path)


@pytest.fixture
def saved(tmp_path, tiny_model):
  """A folder with the tied Llama, and its config."""
  config, params = tiny_model("llama_tied")
  huggingface.save_params(tmp_path, params, config, torch_dtype="float32")
  return tmp_path, config


def test_saved_and_loaded_is_the_same_bit_by_bit(tmp_path, config, params):
  huggingface.save_params(tmp_path, params, config, torch_dtype="float32")
  assert huggingface.load_config(tmp_path) == config
  loaded = huggingface.load_params(tmp_path, config, dtype=jnp.float32)
  _assert_same(loaded, params)


def test_bf16_in_several_files_onto_a_mesh(tmp_path, tiny_model):
  config, params = tiny_model("qwen3")
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  huggingface.save_params(
    tmp_path, half, config, torch_dtype="bfloat16", max_file_bytes=5000
  )
  files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
  assert len(files) > 2 and files[0].startswith("model-00001-of-0000")
  mesh = meshes.split_devices(
    jax.devices(),
    trainer_fsdp=2,
    trainer_sequence=1,
    trainer_tensor=2,
    num_generators=1,
    generator_tensor=1,
    colocated=True,
  ).trainer
  shardings = axes.shardings(transformer.logical_axes(config), mesh, axes.TRAIN)
  loaded = huggingface.load_params(
    tmp_path, config, dtype=jnp.bfloat16, shardings=shardings
  )
  _assert_same(loaded, half)
  assert jax.tree.map(lambda x: x.sharding, loaded) == shardings


def test_heads_are_stored_in_the_order_that_hugging_face_repeats_them():
  # Query head n = k * G + g; here K = 2, G = 2, H = 1, D = 1.
  stored = tensor_names.stored_tensors(
    transformer.ModelConfig(
      vocab_size=8,
      width=1,
      mlp_width=8,
      num_layers=1,
      num_heads=4,
      num_kv_heads=2,
      head_width=2,
      rope_theta=1.0,
      norm_eps=1e-6,
      qk_norm=False,
      qkv_bias=False,
      tied_head=True,
      max_positions=8,
    )
  )
  ours_DKGH = np.array([[[[0, 1], [10, 11]], [[20, 21], [30, 31]]]])
  theirs = stored["blocks"]["query"].to_stored(ours_DKGH)
  assert theirs.tolist() == [[0], [1], [10], [11], [20], [21], [30], [31]]


def test_missing_and_surplus_tensors_are_named(saved):
  folder, config = saved

  def change(tensors):
    tensors["model.stray"] = tensors.pop("model.layers.1.mlp.up_proj.weight")

  _edit(folder, change)
  with pytest.raises(
    ValueError, match=r"missing \['model.layers.1.mlp.up_proj.*'model.stray'"
  ):
    huggingface.load_params(folder, config, dtype=jnp.float32)


def test_a_misshapen_tensor_is_named_with_both_shapes(saved):
  folder, config = saved
  name = "model.norm.weight"
  _edit(folder, lambda tensors: tensors.update({name: np.ones(17, np.float32)}))
  with pytest.raises(ValueError, match=r"model.norm.*\(17,\).*\(16,\)"):
    huggingface.load_params(folder, config, dtype=jnp.float32)


def test_a_truncated_file_is_named(saved):
  folder, config = saved
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(ValueError, match=r"model.safetensors is no whole"):
    huggingface.load_params(folder, config, dtype=jnp.float32)


def test_a_missing_file_of_several_is_named(tmp_path, tiny_model):
  config, params = tiny_model("llama")
  huggingface.save_params(
    tmp_path, params, config, torch_dtype="float32", max_file_bytes=9000
  )
  next(iter(sorted(tmp_path.glob("model-00002*")))).unlink()
  with pytest.raises(FileNotFoundError, match="model-00002"):
    huggingface.load_params(tmp_path, config, dtype=jnp.float32)


def test_a_tied_checkpoint_may_store_the_same_head_but_no_other(saved):
  folder, config = saved

  def store_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

  def change_head(tensors):
    tensors["lm_head.weight"][0, 0] += 1

  before = huggingface.load_params(folder, config, dtype=jnp.float32)
  _edit(folder, store_head)
  _assert_same(
    huggingface.load_params(folder, config, dtype=jnp.float32), before
  )
  _edit(folder, change_head)
  with pytest.raises(ValueError, match="tie_word_embeddings to false"):
    huggingface.load_params(folder, config, dtype=jnp.float32)


def test_the_source_lends_tokenizer_and_token_ids(saved, tmp_path_factory):
  source, config = saved
  hf = json.loads((source / "config.json").read_text())
  assert hf["eos_token_id"] is None
  hf |= {"eos_token_id": [7, 9], "bos_token_id": 1}
  (source / "config.json").write_text(json.dumps(hf))
  (source / "tokenizer.json").write_text("{}")
  params = huggingface.load_params(source, config, dtype=jnp.float32)
  folder = tmp_path_factory.mktemp("export")
  huggingface.save_params(
    folder, params, config, torch_dtype="float16", source_folder=source
  )
  assert (folder / "tokenizer.json").exists()
  written = json.loads((folder / "config.json").read_text())
  assert written["eos_token_id"] == [7, 9]
  assert written["bos_token_id"] == 1
  shutil.rmtree(source)
  assert huggingface.load_config(folder) == config
