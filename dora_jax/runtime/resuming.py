"""Whether a workdir holds a run that this one is to go on with.

The same command in the same workdir goes on by itself. A checkpoint of another
format, or of a run that learns something else, is refused with the difference.
"""

import dataclasses
import json
import pathlib
from typing import Any

from dora_jax import checkpoint
from dora_jax.runtime import following

Config = Any

# Of what a checkpoint holds, and how; another one is refused.
FORMAT = 1
FOLDER = "checkpoints"
# What may change over a resume beside what following.FREE names: how long the
# run goes on, on what and how fast, but not what it learns.
_MAY_CHANGE = (
  "coordinator.num_steps",
  "coordinator.balance_on_step",
  "coordinator.balance_period_s",
  "coordinator.kv_pressure",
  "coordinator.moves",
  "coordinator.repartition",
  "coordinator.filling",
  "coordinator.rollout_groups",
  "generator.attention",
  "generator.chunk_steps",
  "generator.chunks_ahead",
  "generator.page_size",
  "generator.prefill_chunk",
  "generator.slots",
  "mesh",
  "trainer.logprob_chunk",
  "trainer.remat",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """A checkpoint to go on from.

  Attributes:
    version: of its params.
    extras: its JSON values.
  """

  version: int
  extras: dict[str, Any]


def find(config: Config, workdir: pathlib.Path) -> Found | None:
  """Looks for the newest complete checkpoint in a workdir.

  Returns:
    None where there is none: the run begins anew.

  Raises:
    ValueError: there is one that this config cannot go on from.
  """
  folder = workdir / FOLDER
  if not folder.is_dir():
    return None
  version = max(checkpoint.complete_steps(folder), default=None)
  if version is None:
    return None
  extras = checkpoint.read_extras(folder, version)
  if not config.checkpoint.resume:
    raise ValueError(
      f"{workdir} holds a run of {version} steps, and config.checkpoint.resume "
      "is False: give another --workdir."
    )
  _check(config, workdir, extras)
  return Found(version=version, extras=extras)


def is_over(config: Config, workdir: pathlib.Path, found: Found) -> bool:
  """Whether the run has made all its steps, and summed itself up."""
  path = workdir / "summary.json"
  if found.version < config.coordinator.num_steps or not path.exists():
    return False
  return json.loads(path.read_text())["steps"] == found.version


def _check(config: Config, workdir: pathlib.Path, extras: dict) -> None:
  if extras.get("format") != FORMAT:
    raise ValueError(
      f"The checkpoints in {workdir} have format {extras.get('format')}, but "
      f"this code reads {FORMAT}: go on with the code that wrote them, or give "
      "another --workdir."
    )
  differing = following.differing(
    following.header(config),
    extras["config"],
    free=(*following.FREE, *_MAY_CHANGE),
  )
  if differing:
    raise ValueError(
      f"{workdir} holds a run of another config: "
      + "; ".join(differing)
      + ". Change it back, or give another --workdir."
    )
