"""From scored groups to the micro-batches of a step."""

from collections.abc import Sequence
from typing import NamedTuple

from dora_jax import types
from dora_jax.trainer import advantages, packing
from dora_jax.trainer import shaping as shaping_lib


class Step(NamedTuple):
  """What a step trains on.

  Attributes:
    batches: packed; none where no trajectory is trained on.
    shaped: the rewards of each group.
  """

  batches: Sequence[types.PackedBatch]
  shaped: Sequence[shaping_lib.Shaped]


def make_step(
  groups: Sequence[types.Group],
  *,
  shaping: shaping_lib.Shaping,
  advantage: advantages.Settings,
  takes_mixed: bool,
  version: int,
  row_length: int,
  rows_per_batch: int,
) -> Step:
  """Shapes rewards, finds advantages, packs.

  Args:
    groups: scored.
    shaping: what counts as a reward, and who is left out of the loss.
    advantage: how rewards become advantages.
    takes_mixed: whether a trajectory may hold tokens of several versions.
    version: the policy version being trained.
    row_length: tokens in a row.
    rows_per_batch: rows in a micro-batch.

  Raises:
    ValueError: see shaping.shape, advantages.advantages, packing.pack_groups
      and packing.check_unmixed.
  """
  shaped = [shaping_lib.shape(group, shaping) for group in groups]
  batches = packing.pack_groups(
    groups,
    advantages=advantages.advantages(
      [each.rewards for each in shaped],
      [group.trajectories[0].version for group in groups],
      advantage,
    ),
    is_trained=[each.is_trained for each in shaped],
    version=version,
    row_length=row_length,
    rows_per_batch=rows_per_batch,
  )
  if not takes_mixed:
    packing.check_unmixed(groups)
  return Step(batches=batches, shaped=shaped)
