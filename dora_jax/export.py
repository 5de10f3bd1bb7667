"""Writes a checkpoint of a run as a Hugging Face folder.

  python -m dora_jax.export --workdir=DIR --step=N --out=HF_DIR

`transformers` loads the folder. Where the run began from one, its tokenizer and
generation settings go along.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from ml_collections import config_dict

from dora_jax import checkpoint
from dora_jax.model import huggingface, transformer
from dora_jax.runtime import build
from dora_jax.trainer import train_state

_WORKDIR = flags.DEFINE_string("workdir", None, "Workdir of the run.")
_STEP = flags.DEFINE_integer("step", None, "Version; the newest if not given.")
_OUT = flags.DEFINE_string("out", None, "Folder to write.")
_DTYPE = flags.DEFINE_enum(
  "dtype", "float32", ["float32", "bfloat16", "float16"], "Of the tensors."
)


def export(
  workdir: pathlib.Path, out: pathlib.Path, *, step: int | None, dtype: str
) -> int:
  """Writes the folder; returns the version that it holds.

  Args:
    workdir: of a run, with config.json and checkpoints.
    out: made where it is missing.
    step: the version; None takes the newest.
    dtype: of the tensors, by torch's name.

  Raises:
    FileNotFoundError: the workdir has no such checkpoint.
  """
  config = config_dict.ConfigDict(
    json.loads((workdir / "config.json").read_text())
  )
  shape = build.build_model_config(config, build.build_tokenizer(config))
  abstract = _abstract_state(shape, build.build_optimizer(config))
  checkpoints = checkpoint.Checkpoints(
    workdir / "checkpoints", max_to_keep=config.checkpoint.max_to_keep
  )
  try:
    state, extras = checkpoints.restore(step, abstract)
  finally:
    checkpoints.close()
  huggingface.save_params(
    out,
    state.params,
    shape,
    torch_dtype=dtype,
    source_folder=config.model.folder or None,
  )
  return extras["version"]


def _abstract_state(
  shape: transformer.ModelConfig, settings: train_state.OptimizerSettings
) -> train_state.TrainState:
  """What a checkpoint holds, to be restored onto one device."""
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor")
  )
  params = transformer.abstract_params(shape, dtype=jnp.float32)
  create = train_state.make_create(shape, mesh, settings)
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    jax.eval_shape(create, params),
    train_state.state_shardings(shape, mesh, settings),
  )


def main(argv: list[str]) -> None:
  """Exports what the flags name."""
  del argv
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  out = pathlib.Path(_OUT.value)
  version = export(
    pathlib.Path(_WORKDIR.value), out, step=_STEP.value, dtype=_DTYPE.value
  )
  print(f"version {version} is in {out}")


if __name__ == "__main__":
  flags.mark_flags_as_required(["workdir", "out"])
  app.run(main)
