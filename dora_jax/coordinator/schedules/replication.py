"""Replication: start more than a batch, train on the first, drop the rest.

Source: RollPacker (https://arxiv.org/abs/2509.21009) and SortedRL hide the tail
of a synchronous rollout in this way. What is dropped is the longest, so the
trained trajectories are shorter than the generated ones: the ledger counts it,
by length.
"""

import math

from dora_jax.coordinator.schedules import base


class Replication(base.Schedule):
  """Rollout and training take turns, and no turn waits for the longest."""

  name = "replication"
  max_staleness = 0
  drops_groups = True

  def __init__(self, options: base.Options):
    """Takes `oversample`."""
    self._oversample = options.oversample

  def room(self, view: base.View, version: int) -> int:
    """What the oversampled batch still lacks, while the trainer rests."""
    if view.is_training or version != view.newest_version:
      return 0
    started = len(view.ledger.open) + len(view.ledger.ready)
    return math.ceil(view.prompts_per_batch * self._oversample) - started

  def batch(self, view: base.View) -> list[int]:
    """The groups that are ready first."""
    if len(view.ledger.ready) < view.batch_size:
      return []
    return [group_id for _, group_id in view.ledger.ready[: view.batch_size]]

  def to_drop(self, view: base.View) -> list[int]:
    """All that were not among the first."""
    ready = [group_id for _, group_id in view.ledger.ready]
    return [*ready, *view.ledger.open]
