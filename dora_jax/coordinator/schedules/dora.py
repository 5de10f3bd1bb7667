"""DORA: multi-version streaming rollout within rules R1 and R2.

Source: arXiv 2604.26256, sections 3 and 4; the rules are in `window`.
"""

from collections.abc import Mapping
from typing import Any

from dora_jax.coordinator import window
from dora_jax.coordinator.schedules import base

# A trainer that stands idle for less than this share of its step is fed.
_IDLE_SHARE = 0.02
# Steps without such a wait after which work that was left over is given up.
_NUM_STEPS = 4


class Dora(base.Schedule):
  """Starts work ahead of the trainer, and trains the oldest first.

  R2 is the cap. Below it the schedule aims for the least work under way that
  keeps the trainer fed, since more would only be older when it is trained: with
  `rollout_groups` None ("auto" in a config) the aim grows after a step for
  which the trainer lacked groups, by what would have filled the wait, and
  shrinks where in several steps groups were left over. A wait for a straggler
  (R1) does not count: with more under way it would be as long, and all else
  older. Nor does it then fill legacy generators: what starts with an old
  version is old before it is done.

  Attributes:
    max_staleness: K.
    target: where it adapts, the groups to have running or ready.
  """

  name = "dora"
  balances = True

  def __init__(self, options: base.Options):
    """Takes all but `oversample`.

    With `evict`, as in LongCat's report, C2 is given up: what the evicted
    groups had sampled is thrown away, and counted.
    """
    self.max_staleness = options.max_staleness
    self._prompts_per_batch = options.prompts_per_batch
    self._rollout_groups = options.rollout_groups
    self._evict = options.evict
    self.fills = self._rollout_groups is not None
    self.target = min(2, self.max_staleness + 1) * self._prompts_per_batch
    self._left_over: list[int] = []

  def state(self) -> dict[str, Any]:
    """The aim, and what it goes by."""
    return {"target": self.target, "left_over": list(self._left_over)}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state."""
    self.target = state["target"]
    self._left_over = list(state["left_over"])

  def room(self, view: base.View, version: int) -> int:
    """What R2 leaves, up to the aim."""
    running = len(view.ledger.open)
    if self._rollout_groups is None:
      wanted = self.target - running - len(view.ledger.ready)
    else:
      wanted = self._rollout_groups - running
    if wanted <= 0:
      return 0  # As at most events: spares the sums of R2.
    room = window.admission_room(
      version,
      newest_version=view.newest_version,
      next_step=view.next_step,
      max_staleness=self.max_staleness,
      prompts_per_batch=view.prompts_per_batch,
      num_untrained=view.ledger.num_untrained,
    )
    return min(room, wanted)

  def batch(self, view: base.View) -> list[int]:
    """The oldest P ready groups, once R1 allows the step."""
    size = view.batch_size
    if not size or len(view.ledger.ready) < size:
      return []
    if self._blocking_version(view, size) is not None:
      return []
    return [group_id for _, group_id in view.ledger.ready[:size]]

  def to_regenerate(self, view: base.View) -> list[int]:
    """The groups that hold the step back, where they are to be evicted."""
    blocking = None
    if self._evict:
      blocking = self._blocking_version(view, view.batch_size)
    if blocking is None:
      return []
    return [
      group_id
      for group_id, group in view.ledger.open.items()
      if group.version <= blocking
    ]

  def _blocking_version(self, view: base.View, size: int) -> int | None:
    """The first version for which R1 refuses a batch of the oldest groups."""
    num_left = dict(view.ledger.num_untrained)
    for version in sorted(view.ledger.num_ready):
      taken = min(size, view.ledger.num_ready[version])
      num_left[version] -= taken
      size -= taken
    return window.blocking_version(
      view.next_step,
      max_staleness=self.max_staleness,
      prompts_per_batch=view.prompts_per_batch,
      num_left=num_left,
    )

  def step_started(
    self, view: base.View, *, lacked_s: float, step_s: float
  ) -> None:
    """Moves the aim towards the least that leaves the trainer no wait."""
    if not step_s:
      return
    per_batch = self._prompts_per_batch
    if lacked_s > _IDLE_SHARE * step_s:
      # Groups are consumed P a step: so many more would have been in time.
      lacking = round(per_batch * min(1.0, lacked_s / step_s))
      cap = (self.max_staleness + 1) * per_batch
      self.target = min(cap, self.target + max(1, lacking))
      self._left_over.clear()
      return
    self._left_over.append(len(view.ledger.ready))
    if len(self._left_over) == _NUM_STEPS:
      # What was never needed in all of these steps, but for some reserve.
      spare = min(self._left_over) - max(1, per_batch // 8)
      if spare > 0:
        self.target = max(per_batch, self.target - spare)
      self._left_over.clear()
