"""Finished trajectories as a few flat arrays and JSON, and back.

A checkpoint holds them so: an array for each field, of all trajectories end to
end. Prompts are not among them: a group's is a function of its id.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dora_jax import interfaces, types
from dora_jax.coordinator import ledger as ledger_lib
from dora_jax.runtime import executing

_FIELDS = ("completion", "token_versions", "behavior_logprobs", "kept_mass")

Arrays = dict[str, np.ndarray]


def pack(
  groups: Mapping[int, executing.GroupData],
  trained: Mapping[int, executing.GroupData],
  ledger: ledger_lib.Ledger,
) -> tuple[list[Any], Arrays]:
  """Packs what steps may train on, for the first time or again.

  Args:
    groups: by id; of these what the ledger counts as finished.
    trained: by id; all of it.
    ledger: at the same instant.

  Returns:
    JSON-able, an entry a trajectory; and the arrays, each of one element more
    than there are tokens, so that none is empty.
  """
  entries, found = [], []
  for group_id, data in {**trained, **groups}.items():
    members = sorted(data.trajectories)
    if group_id in groups:
      members = _finished(group_id, data, ledger)
    for member in members:
      trajectory = data.trajectories[member]
      found.append(trajectory)
      entries.append(
        [
          group_id,
          member,
          trajectory.version,
          len(trajectory.completion),
          trajectory.finish_reason,
          data.rewards.get(member),
          dict(data.components.get(member, {})),
        ]
      )
  return entries, {name: _join(found, name) for name in _FIELDS}


def abstract(entries: Sequence[Any], dtypes: Mapping[str, str]) -> Arrays:
  """Arrays like those that belong to these entries, to restore into."""
  size = 1 + sum(entry[3] for entry in entries)
  return {name: np.empty(size, dtypes[name]) for name in _FIELDS}


def unpack(
  entries: Sequence[Any], arrays: Arrays, task: interfaces.Task
) -> dict[int, executing.GroupData]:
  """The groups that `pack` has packed.

  Args:
    entries: as `pack` returned them, after JSON.
    arrays: likewise.
    task: gives the prompts again.
  """
  groups: dict[int, executing.GroupData] = {}
  start = 0
  for group_id, member, version, length, reason, reward, components in entries:
    if group_id not in groups:
      groups[group_id] = executing.GroupData(prompt=task.prompt(group_id))
    data = groups[group_id]
    tokens = {n: arrays[n][start : start + length] for n in _FIELDS}
    start += length
    data.trajectories[member] = types.Trajectory(
      group_id=group_id,
      member=member,
      version=version,
      prompt=data.prompt.tokens,
      finish_reason=reason,
      **tokens,
    )
    if reward is not None:
      data.rewards[member] = reward
      data.components[member] = components
  return groups


def _finished(
  group_id: int, data: executing.GroupData, ledger: ledger_lib.Ledger
) -> list[int]:
  """Members whose trajectories are not to be generated once more."""
  if group_id not in ledger.open:
    is_kept = group_id in ledger.in_batch or ledger.is_ready(group_id)
    return sorted(data.trajectories) if is_kept else []
  group = ledger.open[group_id]
  left = {*group.waiting, *group.running}
  return [member for member in sorted(data.trajectories) if member not in left]


def _join(trajectories: Sequence[types.Trajectory], name: str) -> np.ndarray:
  parts = [getattr(trajectory, name) for trajectory in trajectories]
  dtype = np.result_type(*parts) if parts else np.float32
  return np.concatenate([*parts, np.zeros(1, dtype)], dtype=dtype)
