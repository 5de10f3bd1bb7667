"""What every schedule decides, and what it may look at."""

import dataclasses
from typing import Protocol, runtime_checkable

from dora_jax.coordinator import ledger as ledger_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
  """What a schedule sees when it decides; it changes nothing of it.

  Attributes:
    ledger: where every group is.
    newest_version: the newest version that exists.
    is_training: whether a step is being made.
    prompts_per_batch: P, groups that a step consumes.
    is_draining: no further group will ever start (end of the run or the data).
  """

  ledger: ledger_lib.Ledger
  newest_version: int
  is_training: bool
  prompts_per_batch: int
  is_draining: bool

  @property
  def next_step(self) -> int:
    """The next step to start."""
    return self.newest_version + self.is_training

  @property
  def batch_size(self) -> int:
    """Groups of the next batch: P, or what is left when nothing more starts."""
    if not self.is_draining:
      return self.prompts_per_batch
    left = len(self.ledger.ready) + len(self.ledger.open)
    return min(self.prompts_per_batch, left)


@runtime_checkable
class Schedule(Protocol):
  """A strategy; it may keep state of its own between calls."""

  max_staleness: int

  def room(self, view: View, version: int) -> int:
    """How many groups may start now with this version."""
    ...

  def batch(self, view: View) -> list[int]:
    """The groups to train on now; empty where the step has to wait."""
    ...

  def step_started(self, view: View, *, waited_s: float, step_s: float) -> None:
    """Hears of a step that starts, so that it can adapt.

    Args:
      view: as it is after the batch has been taken.
      waited_s: how long the trainer stood idle before it.
      step_s: how long the step before it took; 0.0 for the first.
    """
    ...
