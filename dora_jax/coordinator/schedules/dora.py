"""DORA: multi-version streaming rollout within rules R1 and R2.

Source: arXiv 2604.26256, sections 3 and 4; the rules are in `window`.
"""

import collections

from dora_jax.coordinator import window
from dora_jax.coordinator.schedules import base

# A trainer that stands idle for less than this share of its step is fed.
_IDLE_SHARE = 0.05


class Dora:
  """Starts work ahead of the trainer, and trains the oldest first.

  R2 is the cap. Below it the schedule aims for the least work under way that
  keeps the trainer fed, since more would only be older when it is trained: with
  `rollout_groups` None ("auto" in a config) the aim grows by P/4 after a step
  that the trainer had to wait for, and shrinks where groups were left over.

  Attributes:
    max_staleness: K.
    target: where it adapts, the groups to have running or ready.
  """

  def __init__(
    self,
    *,
    max_staleness: int,
    prompts_per_batch: int,
    rollout_groups: int | None,
  ):
    """Sets the aim.

    Args:
      max_staleness: K.
      prompts_per_batch: P.
      rollout_groups: the paper's RBS in groups, that is how many may be
        unfinished at once; None adapts it.
    """
    self.max_staleness = max_staleness
    self.target = min(2, max_staleness + 1) * prompts_per_batch
    self._prompts_per_batch = prompts_per_batch
    self._rollout_groups = rollout_groups

  def room(self, view: base.View, version: int) -> int:
    """What R2 leaves, up to the aim."""
    room = window.admission_room(
      version,
      newest_version=view.newest_version,
      next_step=view.next_step,
      max_staleness=self.max_staleness,
      prompts_per_batch=view.prompts_per_batch,
      num_untrained=view.ledger.num_untrained,
    )
    running = len(view.ledger.open)
    if self._rollout_groups is None:
      wanted = self.target - running - len(view.ledger.ready)
    else:
      wanted = self._rollout_groups - running
    return min(room, wanted)

  def batch(self, view: base.View) -> list[int]:
    """The oldest P ready groups, once R1 allows the step."""
    chosen = view.ledger.ready[: view.batch_size]
    if len(chosen) < view.batch_size:
      return []
    num_left = collections.Counter(view.ledger.num_untrained)
    num_left.subtract(version for version, _ in chosen)
    if not window.is_step_allowed(
      view.next_step,
      max_staleness=self.max_staleness,
      prompts_per_batch=view.prompts_per_batch,
      num_left=num_left,
    ):
      return []
    return [group_id for _, group_id in chosen]

  def step_started(
    self, view: base.View, *, waited_s: float, step_s: float
  ) -> None:
    """Moves the aim towards the least that leaves the trainer no wait."""
    if not step_s:
      return
    left_over = len(view.ledger.ready)
    if waited_s > _IDLE_SHARE * step_s:
      cap = (self.max_staleness + 1) * self._prompts_per_batch
      self.target = min(cap, self.target + max(1, self._prompts_per_batch // 4))
    elif left_over:
      self.target = max(
        self._prompts_per_batch, self.target - left_over // 2 - 1
      )
