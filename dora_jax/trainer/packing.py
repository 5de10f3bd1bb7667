"""Packs sequences of many lengths into rows of one length.

Every micro-batch has the one shape [rows_per_batch, row_length], so that the
train step compiles once.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from dora_jax import types

# The largest log-probability that rounding in float32 explains.
_MAX_LOGPROB = 1e-6

# Lengths differ from pair to pair, so they bear no name.
Pair = tuple[Int[np.ndarray, "_"], Int[np.ndarray, "_"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sequence:
  """A prompt and its completion, with what the loss wants to know of them."""

  prompt: Int[np.ndarray, "S"]
  completion: Int[np.ndarray, "T"]
  behavior_logprobs: Float[np.ndarray, "T"]
  advantage: float
  lags: Int[np.ndarray, "T"]
  trajectory_id: int

  def __len__(self) -> int:
    return len(self.prompt) + len(self.completion)


def pack_groups(
  groups: Sequence[types.Group],
  *,
  advantages: Sequence[Float[np.ndarray, "_"]],
  is_trained: Sequence[Bool[np.ndarray, "_"]],
  version: int,
  row_length: int,
  rows_per_batch: int,
) -> list[types.PackedBatch]:
  """Packs those trajectories of the groups that are trained on.

  Rows are filled first-fit decreasing.

  The result depends on the arguments alone: sequences of one length keep the
  order of groups and members.

  Args:
    groups: scored groups.
    advantages: of each group's members.
    is_trained: of each group's members; the others are left out.
    version: the policy version being trained, from which the lag of each token
      is counted.
    row_length: tokens in a row.
    rows_per_batch: rows in a micro-batch; the last one is filled with padding.

  Raises:
    ValueError: a trajectory is malformed, from a future version, or longer
      than a row.

  Returns:
    Nothing at all where no trajectory is trained on.
  """
  if not groups:
    raise ValueError("Found 0 groups to train on, need at least 1.")
  for group in groups:
    _check_group(group, version)
  members = [t for group in groups for t in group.trajectories]
  kept = np.flatnonzero(np.concatenate(is_trained)).tolist()
  flat_advantages = np.concatenate(advantages)
  sequences = [
    _Sequence(
      prompt=members[index].prompt,
      completion=members[index].completion,
      behavior_logprobs=members[index].behavior_logprobs,
      advantage=float(flat_advantages[index]),
      lags=version - members[index].token_versions,
      trajectory_id=index,
    )
    for index in kept
  ]
  names = [name_of(members[index]) for index in kept]
  return _pack(sequences, names, row_length, rows_per_batch)


def pack_examples(
  pairs: Sequence[Pair], *, row_length: int, rows_per_batch: int
) -> list[types.PackedBatch]:
  """Packs (prompt, completion) pairs for supervised training.

  The loss mask covers the completions, whose advantages are 1, behavior
  log-probabilities 0 and lags 0.
  """
  sequences = [
    _Sequence(
      prompt=prompt,
      completion=completion,
      behavior_logprobs=np.zeros(len(completion), np.float32),
      advantage=1.0,
      lags=np.zeros(len(completion), np.int32),
      trajectory_id=index,
    )
    for index, (prompt, completion) in enumerate(pairs)
  ]
  if not pairs:
    raise ValueError("Found 0 pairs to train on, need at least 1.")
  names = [f"Pair {index}" for index in range(len(pairs))]
  return _pack(sequences, names, row_length, rows_per_batch)


def check_unmixed(groups: Sequence[types.Group]) -> None:
  """Refuses trajectories with tokens of several versions.

  Raises:
    ValueError: a token was sampled by another version than the trajectory's.
  """
  for group in groups:
    for trajectory in group.trajectories:
      is_other = trajectory.token_versions != trajectory.version
      if is_other.any():
        found = sorted({*trajectory.token_versions.tolist()})
        raise ValueError(
          f"{name_of(trajectory)}: its version is {trajectory.version}, but "
          f"versions {found} sampled its tokens, which needs "
          'config.trainer.proximal "current" or "loglinear".'
        )


def name_of(trajectory: types.Trajectory) -> str:
  """By which messages speak of a trajectory."""
  return f"Group {trajectory.group_id}, member {trajectory.member}"


def _check_group(group: types.Group, version: int) -> None:
  """Refuses a group whose parts do not fit together."""
  if len(group.rewards) != len(group.trajectories):
    raise ValueError(
      f"Group {group.group_id} has {len(group.trajectories)} trajectories but "
      f"{len(group.rewards)} rewards: every member needs one."
    )
  for member, trajectory in enumerate(group.trajectories):
    if (trajectory.group_id, trajectory.member) != (group.group_id, member):
      raise ValueError(
        f"Group {group.group_id} holds in place {member} the trajectory of "
        f"group {trajectory.group_id}, member {trajectory.member}."
      )
    _check_trajectory(trajectory, version)


def _check_trajectory(trajectory: types.Trajectory, version: int) -> None:
  """Refuses a trajectory that an engine has delivered in pieces."""
  name = name_of(trajectory)
  lengths = {
    "completion": len(trajectory.completion),
    "behavior_logprobs": len(trajectory.behavior_logprobs),
    "token_versions": len(trajectory.token_versions),
    "kept_mass": len(trajectory.kept_mass),
  }
  if len(set(lengths.values())) != 1:
    raise ValueError(f"{name}: lengths differ, {lengths}; they must be equal.")
  logprobs = trajectory.behavior_logprobs
  # Written so that NaN is refused as well.
  is_bad = ~(np.isfinite(logprobs) & (logprobs <= _MAX_LOGPROB))
  if is_bad.any():
    index = int(is_bad.argmax())
    raise ValueError(
      f"{name}: behavior log-probability {logprobs[index]} at index {index}; "
      "it must be finite and at most 0."
    )
  kept_mass = trajectory.kept_mass
  if not ((kept_mass > 0) & (kept_mass <= 1)).all():
    raise ValueError(
      f"{name}: truncation kept from {kept_mass.min()} to {kept_mass.max()} of "
      "the probability; it must be above 0 and at most 1."
    )
  if trajectory.version > version:
    raise ValueError(
      f"{name}: sampled by version {trajectory.version}, but version {version} "
      "is being trained: a trajectory cannot come from the future."
    )
  is_outside = (trajectory.token_versions < trajectory.version) | (
    trajectory.token_versions > version
  )
  if is_outside.any():
    index = int(is_outside.argmax())
    raise ValueError(
      f"{name}: token {index} sampled by version "
      f"{trajectory.token_versions[index]}; it must be from "
      f"{trajectory.version}, the trajectory's oldest, to {version}, which is "
      "being trained."
    )


def _pack(
  sequences: list[_Sequence],
  names: list[str],
  row_length: int,
  rows_per_batch: int,
) -> list[types.PackedBatch]:
  """Fills rows with the sequences and cuts the rows into micro-batches."""
  for name, sequence in zip(names, sequences, strict=True):
    if not len(sequence.prompt) or not len(sequence.completion):
      raise ValueError(
        f"{name}: prompt of {len(sequence.prompt)} and completion of "
        f"{len(sequence.completion)} tokens; each needs at least 1."
      )
    if len(sequence) > row_length:
      raise ValueError(
        f"{name}: {len(sequence)} tokens do not fit into a row of {row_length}:"
        " raise config.trainer.row_length."
      )
  rows = _fit([len(sequence) for sequence in sequences], row_length)
  return [
    _fill(
      [[sequences[i] for i in row] for row in rows[at : at + rows_per_batch]],
      row_length,
      rows_per_batch,
    )
    for at in range(0, len(rows), rows_per_batch)
  ]


def _fit(lengths: list[int], row_length: int) -> list[list[int]]:
  """Assigns indices of sequences to rows, first-fit decreasing.

  At most 11/9 of the least number of rows, plus one.
  Source: Johnson et al., SIAM J. Comput. 3(4), 1974.
  """
  rows: list[list[int]] = []
  room: list[int] = []
  for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    length = lengths[index]
    fitting = (row for row, left in enumerate(room) if left >= length)
    row = next(fitting, len(rows))
    if row == len(rows):
      rows.append([])
      room.append(row_length)
    rows[row].append(index)
    room[row] -= length
  return rows


def _fill(
  rows: list[list[_Sequence]], row_length: int, rows_per_batch: int
) -> types.PackedBatch:
  """Writes the sequences of each row one after the other."""
  shape = (rows_per_batch, row_length)
  batch = types.PackedBatch(
    tokens=np.zeros(shape, np.int32),
    positions=np.zeros(shape, np.int32),
    segment_ids=np.zeros(shape, np.int32),
    loss_mask=np.zeros(shape, np.float32),
    advantages=np.zeros(shape, np.float32),
    behavior_logprobs=np.zeros(shape, np.float32),
    lags=np.zeros(shape, np.int32),
    trajectory_ids=np.zeros(shape, np.int32),
  )
  for row, sequences in enumerate(rows):
    start = 0
    for segment_id, sequence in enumerate(sequences, start=1):
      sampled = start + len(sequence.prompt)
      end = start + len(sequence)
      batch.tokens[row, start:sampled] = sequence.prompt
      batch.tokens[row, sampled:end] = sequence.completion
      batch.positions[row, start:end] = np.arange(len(sequence))
      batch.segment_ids[row, start:end] = segment_id
      batch.loss_mask[row, sampled:end] = 1.0
      batch.advantages[row, sampled:end] = sequence.advantage
      batch.behavior_logprobs[row, sampled:end] = sequence.behavior_logprobs
      batch.lags[row, sampled:end] = sequence.lags
      batch.trajectory_ids[row, sampled:end] = sequence.trajectory_id
      start = end
  return batch
