"""Opens the record of another run, for a run that is to follow it."""

import itertools
import json
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dora_jax.runtime import pieces, record

Config = Any

# What changes neither a token nor a recorded decision: where things are, how
# fast they are, how much memory they have, what is measured and kept beside.
FREE = (
  "checkpoint",
  "evaluation",
  "generator.memory_share",
  "generator.num_pages",
  "runtime",
  "mesh.host_devices",
  "model.folder",
  "task.heldout_path",
  "task.path",
  "task.reward_memory_gib",
  "task.reward_network",
  "task.reward_retries",
  "task.reward_timeout_s",
  "task.reward_workers",
  "tokenizer.folder",
)


def header(config: Config) -> dict[str, Any]:
  """What the record of a run says of the run: its config, JSON-able."""
  return json.loads(json.dumps(config.to_dict(), default=list))


def open_record(
  config: Config,
  workdir: pathlib.Path,
  path: pathlib.Path,
  *,
  num_past: int = 0,
) -> record.ReplayGate:
  """Opens a record for a run of this config to follow.

  Args:
    config: of the run.
    workdir: of the run.
    path: of the record.
    num_past: events that the run in the workdir, which is resumed, has behind
      it; its own record must begin with the same.

  Raises:
    ValueError: the run cannot follow it: it would overwrite it, mixes versions,
      has another config, or has gone another way already.
  """
  if path.resolve() == (workdir / record.FILE_NAME).resolve():
    raise ValueError(
      f"--replay={path} is where this run would write its own record: give "
      "another --workdir."
    )
  if pieces.make_schedule(config).mixes_versions:
    raise ValueError(
      f"--replay cannot follow config.coordinator.schedule "
      f"{config.coordinator.schedule!r}: at which token a live request takes a "
      "new version is not recorded."
    )
  recorded, events = record.read_events(path)
  found = differing(header(config), recorded, free=FREE)
  if found:
    raise ValueError(
      f"--replay={path} records a run of another config: {found[0]}"
      + (f", and {len(found) - 1} more fields" if found[1:] else "")
      + ". A run follows only a record of its own config."
    )
  if num_past:
    past = list(itertools.islice(events, num_past))
    own = record.read_events(workdir / record.FILE_NAME)[1]
    if past != list(itertools.islice(own, num_past)):
      raise ValueError(
        f"{workdir} holds a run that has not followed --replay={path}: give "
        "another --workdir."
      )
  return record.ReplayGate(events)


def differing(
  here: Mapping, recorded: Mapping, *, free: Collection[str]
) -> list[str]:
  """Says of each field that is not the same in both what it is in each.

  Args:
    here: a config as `header` gives it.
    recorded: likewise, of another run.
    free: fields and sections that may differ.
  """
  ours, theirs = dict(_leaves(here)), dict(_leaves(recorded))
  return [
    f"config.{name} is {ours.get(name)!r}, but {theirs.get(name)!r} there"
    for name in sorted(ours.keys() | theirs.keys())
    if not (name in free or name.split(".")[0] in free)
    and ours.get(name) != theirs.get(name)
  ]


def _leaves(values: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
  """Each field by its whole name."""
  for name, value in values.items():
    if isinstance(value, Mapping):
      yield from _leaves(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", value
