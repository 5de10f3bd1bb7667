"""One step off: a batch is generated while the one before it is trained.

Source: Noukhovitch et al. (https://arxiv.org/abs/2410.18252). Training hides
behind rollout or rollout behind training, but each batch still waits for its
longest trajectory, on every generator.
"""

from dora_jax.coordinator.schedules import base


class OneStepOff(base.Schedule):
  """Two batches alternate; each is sampled by the version before its step."""

  name = "one_step_off"
  max_staleness = 1

  def room(self, view: base.View, version: int) -> int:
    """What the batch that is being generated still lacks.

    It has the version that was the newest when it began, but for groups that
    start where a newer one is served by then.
    """
    begun = min(view.ledger.num_untrained, default=view.newest_version)
    if version not in (begun, view.newest_version):
      return 0
    started = len(view.ledger.open) + len(view.ledger.ready)
    return view.prompts_per_batch - started

  def batch(self, view: base.View) -> list[int]:
    """The whole batch, once its last member is scored."""
    return base.whole_batch(view)
