"""Writes a checkpoint of a run as a Hugging Face folder.

  python -m dora_jax.export --workdir=DIR --step=N --out=HF_DIR

`transformers` loads the folder. Where the run began from one, its tokenizer and
generation settings go along. With --averaged it gets the running average of the
params that config.trainer.ema_decay keeps.
"""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from ml_collections import config_dict

from dora_jax import checkpoint
from dora_jax.model import huggingface, transformer
from dora_jax.parallel import meshes
from dora_jax.runtime import pieces
from dora_jax.trainer import gradients, train_state
from dora_jax.trainer import trained as trained_lib


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
    _abstract_state(config, shape),
  )


def export(
  workdir: pathlib.Path,
  out: pathlib.Path,
  *,
  step: int | None,
  dtype: str,
  averaged: bool,
) -> None:
  """Writes a version as a Hugging Face folder.

  Args:
    workdir: of a run.
    out: made where it is missing.
    step: the version; None takes the newest.
    dtype: of the tensors, by torch's name.
    averaged: whether the running average is written, not the params.

  Raises:
    FileNotFoundError: the workdir has no such checkpoint.
    ValueError: the run kept no average.
  """
  config, shape = _read(workdir)
  state = restore(workdir, step=step)
  found = state.average if averaged else state.params
  if found is None:
    raise ValueError(
      "The run kept no average of its params: config.trainer.ema_decay was "
      f"{config.trainer.ema_decay} but must be above 0 for --averaged."
    )
  whole = gradients.make_whole(
    pieces.make_trained(config, shape), _one_device()
  )
  huggingface.save_params(
    out,
    whole(found, state.frozen),
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


def _one_device() -> jax.sharding.Mesh:
  return meshes.make_trainer_mesh(
    jax.devices()[:1], fsdp=1, sequence=1, tensor=1
  )


def _abstract_state(
  config: Any, shape: transformer.ModelConfig
) -> train_state.TrainState:
  """What a checkpoint holds, to be restored onto one device."""
  mesh, trained = _one_device(), pieces.make_trained(config, shape)
  critic, frozen = pieces.make_critic(config), None
  of_critic = critic and train_state.abstract_state(
    trained_lib.Critic(shape), mesh, critic.optimizer
  )
  if trained.base is not None:
    dtype = jnp.dtype(config.model.compute_dtype)
    frozen = jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(
        x.shape, dtype, sharding=sharding
      ),
      *train_state.param_layout(trained.base, mesh),
    )
  made = train_state.abstract_state(
    trained, mesh, pieces.make_optimizer(config)
  )
  return dataclasses.replace(made, critic=of_critic, frozen=frozen)


def main(argv: list[str]) -> None:
  """Exports what the flags name."""
  del argv
  given = flags.FLAGS
  if not given["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  out = pathlib.Path(given.out)
  export(
    pathlib.Path(given.workdir),
    out,
    step=given.step,
    dtype=given.dtype,
    averaged=given.averaged,
  )
  print(f"written to {out}")


def define_flags() -> None:
  """Defines the flags; only where this is the program that runs."""
  flags.DEFINE_string("workdir", None, "Workdir of the run.", required=True)
  flags.DEFINE_string("out", None, "Folder to write.", required=True)
  flags.DEFINE_integer("step", None, "Version; the newest if not given.")
  flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"], "Of the tensors."
  )
  flags.DEFINE_bool("averaged", False, "Write the running average.")


if __name__ == "__main__":
  define_flags()
  app.run(main)
