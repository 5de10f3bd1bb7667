"""Writes a checkpoint of a run as a Hugging Face folder.

  python -m dora_jax.export --workdir=DIR --step=N --out=HF_DIR

`transformers` loads the folder. Where the run began from one, its tokenizer and
generation settings go along.
"""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from ml_collections import config_dict

from dora_jax import checkpoint
from dora_jax.model import huggingface, transformer
from dora_jax.runtime import pieces
from dora_jax.trainer import train_state


def restore(
  workdir: pathlib.Path, *, step: int | None
) -> train_state.TrainState:
  """Reads the train state of a version onto one device.

  Args:
    workdir: of a run, with config.json and checkpoints.
    step: the version; None takes the newest.

  Raises:
    FileNotFoundError: the workdir has no such checkpoint.
  """
  config, shape = _read(workdir)
  return checkpoint.read_state(
    workdir / "checkpoints",
    step,
    _abstract_state(shape, pieces.make_optimizer(config)),
  )


def export(
  workdir: pathlib.Path, out: pathlib.Path, *, step: int | None, dtype: str
) -> None:
  """Writes a version as a Hugging Face folder.

  Args:
    workdir: of a run.
    out: made where it is missing.
    step: the version; None takes the newest.
    dtype: of the tensors, by torch's name.
  """
  config, shape = _read(workdir)
  huggingface.save_params(
    out,
    restore(workdir, step=step).params,
    shape,
    torch_dtype=dtype,
    source_folder=config.model.folder or None,
  )


def _read(workdir: pathlib.Path) -> tuple[Any, transformer.ModelConfig]:
  """The run's config, and the shape of its model."""
  config = config_dict.ConfigDict(
    json.loads((workdir / "config.json").read_text())
  )
  return config, pieces.make_model_config(config, pieces.make_tokenizer(config))


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
  given = flags.FLAGS
  if not given["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  out = pathlib.Path(given.out)
  export(pathlib.Path(given.workdir), out, step=given.step, dtype=given.dtype)
  print(f"written to {out}")


def define_flags() -> None:
  """Defines the flags; only where this is the program that runs."""
  flags.DEFINE_string("workdir", None, "Workdir of the run.", required=True)
  flags.DEFINE_string("out", None, "Folder to write.", required=True)
  flags.DEFINE_integer("step", None, "Version; the newest if not given.")
  flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"], "Of the tensors."
  )


if __name__ == "__main__":
  define_flags()
  app.run(main)
