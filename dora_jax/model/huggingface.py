"""Reads and writes checkpoints in Hugging Face's layout.

A weight goes from its file into its place on the devices before the next one
is read, so that the host never holds more than one weight (all its layers).
"""

import json
import pathlib
import reprlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax import interfaces
from dora_jax.model import families, tensor_files, tensor_names, transformer

# Beside the weights: what a tokenizer and `generate` need.
_COMPANIONS = (
  "added_tokens.json",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
  "merges.txt",
  "special_tokens_map.json",
  "tokenizer.json",
  "tokenizer.model",
  "tokenizer_config.json",
  "vocab.json",
)
_TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_config(folder: pathlib.Path | str) -> transformer.ModelConfig:
  """The ModelConfig of a folder's config.json."""
  return families.from_hf(_read_json(pathlib.Path(folder) / "config.json"))


def load_params(
  folder: pathlib.Path | str,
  config: transformer.ModelConfig,
  *,
  dtype: Any,
  shardings: Any = None,
) -> interfaces.Params:
  """Reads a checkpoint's weights onto the devices.

  Args:
    folder: with model.safetensors, or several files and their index.
    config: of the checkpoint, as `load_config` gives it.
    dtype: to cast to.
    shardings: tree of jax.sharding.Sharding like the params; None puts all on
      the first device.
  """
  if shardings is None:
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(
      lambda _: first, transformer.abstract_params(config, dtype=dtype)
    )
  with tensor_files.open_folder(pathlib.Path(folder)) as files:
    _check_tensors(files, config, pathlib.Path(folder))

    def load(shape, tensor, sharding):
      host = _read_weight(files, tensor, shape)
      return jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[index]
      )

    return jax.tree.map(
      load,
      transformer.abstract_params(config, dtype=dtype),
      tensor_names.stored_tensors(config),
      shardings,
    )


def save_params(
  folder: pathlib.Path | str,
  params: interfaces.Params,
  config: transformer.ModelConfig,
  *,
  torch_dtype: str,
  source_folder: pathlib.Path | str | None = None,
  max_file_bytes: int = 5_000_000_000,
) -> None:
  """Writes a checkpoint that `transformers` loads.

  Args:
    folder: made where it is missing.
    params: in any dtype and sharding.
    config: of the params.
    torch_dtype: to store in: "float32", "bfloat16" or "float16".
    source_folder: the checkpoint that training started from, whose tokenizer,
      generation settings and special token ids go along; None writes none.
    max_file_bytes: where to begin another file.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  _check_shapes(params, config)
  dtype = jnp.dtype(torch_dtype)
  tensor_files.write_folder(
    folder,
    _stored_arrays(params, config, dtype),
    sizes_bytes=_stored_sizes(config, dtype),
    max_file_bytes=max_file_bytes,
  )
  # config.json comes last: a folder without it is an unfinished export.
  hf = families.to_hf(config) | {"torch_dtype": torch_dtype}
  hf |= dict.fromkeys(_TOKEN_ID_KEYS)
  if source_folder is not None:
    source = pathlib.Path(source_folder)
    source_hf = _read_json(source / "config.json")
    hf |= {key: source_hf.get(key) for key in _TOKEN_ID_KEYS}
    for name in _COMPANIONS:
      if (source / name).exists():
        shutil.copyfile(source / name, folder / name)
  (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  if not path.exists():
    raise FileNotFoundError(
      f"{path} does not exist but a checkpoint needs it: change config.model "
      "to a folder in Hugging Face's layout."
    )
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f"{path} is not JSON that can be read ({error}): fetch it again, or "
      "change config.model."
    ) from error
  if not isinstance(found, dict):
    raise ValueError(
      f"{path} holds {reprlib.repr(found)}, but it must hold a JSON object: "
      "fetch it again, or change config.model."
    )
  return found


def _expected_shapes(
  config: transformer.ModelConfig,
) -> dict[str, tuple[int, ...]]:
  """The shape of each tensor that a checkpoint of this config must hold."""
  shapes = {}

  def add(array, tensor):
    for layer, name in tensor_names.layer_names(tensor, config.num_layers):
      ours = array.shape if layer is None else array.shape[1:]
      shapes[name] = tensor.stored_shape(ours)

  abstract = transformer.abstract_params(config, dtype=jnp.float32)
  jax.tree.map(add, abstract, tensor_names.stored_tensors(config))
  return shapes


def _check_tensors(
  files: tensor_files.TensorFiles,
  config: transformer.ModelConfig,
  folder: pathlib.Path,
) -> None:
  """Every tensor is used once, has its shape, and a tied head is tied."""
  expected = _expected_shapes(config)
  missing = sorted(expected.keys() - files.names)
  surplus = files.names - expected.keys()
  if config.tied_head and tensor_names.HEAD in surplus:
    surplus = surplus - {tensor_names.HEAD}
    _check_tied(files, folder)
  if missing or surplus:
    raise ValueError(
      f"The tensors in {folder} are not those of its config.json: missing "
      f"{missing}, surplus {sorted(surplus)}. Correct config.json, or change "
      "config.model."
    )
  for name, shape in expected.items():
    if files.shape(name) != shape:
      raise ValueError(
        f"The tensor {name!r} in {folder} has shape {files.shape(name)} but "
        f"config.json asks for {shape}: correct it, or change config.model."
      )


def _check_tied(files: tensor_files.TensorFiles, folder: pathlib.Path) -> None:
  head = files.read(tensor_names.HEAD)
  if tensor_names.EMBED in files.names and not np.array_equal(
    head, files.read(tensor_names.EMBED)
  ):
    raise ValueError(
      f"{folder} stores {tensor_names.HEAD!r}, which differs from "
      f"{tensor_names.EMBED!r}, but config.json ties them: set "
      "tie_word_embeddings to false in it."
    )


def _check_shapes(
  params: interfaces.Params, config: transformer.ModelConfig
) -> None:
  def check(path, expected, array):
    if array.shape != expected.shape:
      raise ValueError(
        f"params{jax.tree_util.keystr(path)} has shape {array.shape} but the "
        f"model's config asks for {expected.shape}: pass the config that the "
        "params were made for."
      )

  abstract = transformer.abstract_params(config, dtype=jnp.float32)
  jax.tree.map_with_path(check, abstract, params)


def _read_weight(
  files: tensor_files.TensorFiles,
  tensor: tensor_names.StoredTensor,
  weight: jax.ShapeDtypeStruct,
) -> np.ndarray:
  """One weight on the host, its layers stacked, cast to its dtype."""
  host = np.empty(weight.shape, weight.dtype)
  for layer, name in tensor_names.layer_names(tensor, weight.shape[0]):
    place = host if layer is None else host[layer]
    place[...] = tensor.from_stored(files.read(name), place.shape)
  return host


def _stored_arrays(
  params: interfaces.Params, config: transformer.ModelConfig, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
  """Each tensor's name and array, weight by weight."""
  tensors = jax.tree.leaves(tensor_names.stored_tensors(config))
  for array, tensor in zip(jax.tree.leaves(params), tensors, strict=True):
    host = np.asarray(jax.device_get(array)).astype(dtype, copy=False)
    for layer, name in tensor_names.layer_names(tensor, config.num_layers):
      yield name, tensor.to_stored(host if layer is None else host[layer])


def _stored_sizes(
  config: transformer.ModelConfig, dtype: np.dtype
) -> dict[str, int]:
  return {
    name: int(np.prod(shape)) * dtype.itemsize
    for name, shape in _expected_shapes(config).items()
  }
