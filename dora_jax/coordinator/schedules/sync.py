"""Synchronous: a batch starts together, ends together, and is trained alone."""

from dora_jax.coordinator.schedules import base


class Sync(base.Schedule):
  """Rollout and training take turns; every trajectory is on-policy."""

  name = "sync"
  max_staleness = 0

  def room(self, view: base.View, version: int) -> int:
    """What the batch of this version still lacks, while the trainer rests."""
    if view.is_training or version != view.newest_version:
      return 0
    started = len(view.ledger.open) + len(view.ledger.ready)
    return view.prompts_per_batch - started

  def batch(self, view: base.View) -> list[int]:
    """The whole batch, once its last member is scored."""
    return base.whole_batch(view)
