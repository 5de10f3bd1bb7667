"""What every schedule decides, and what it may look at."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from dora_jax.coordinator import ledger as ledger_lib


@dataclasses.dataclass(kw_only=True)
class View:
  """What a schedule sees when it decides; it changes nothing of it.

  Attributes:
    ledger: where every group is.
    prompts_per_batch: P, groups that a step consumes.
    newest_version: the newest version that exists.
    is_training: whether a step is being made.
    num_left_to_start: groups that may still start before the run or its data
      ends; unless groups are dropped, none ever start after it is 0.
  """

  ledger: ledger_lib.Ledger
  prompts_per_batch: int
  newest_version: int = 0
  is_training: bool = False
  num_left_to_start: int = 1

  @property
  def next_step(self) -> int:
    """The next step to start."""
    return self.newest_version + self.is_training

  @property
  def batch_size(self) -> int:
    """Groups of the next batch: P, or what is left when nothing more starts."""
    if self.num_left_to_start:
      return self.prompts_per_batch
    left = len(self.ledger.ready) + len(self.ledger.open)
    return min(self.prompts_per_batch, left)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """What schedules can be told; each takes what concerns it.

  Attributes:
    max_staleness: K.
    prompts_per_batch: P, groups that a step consumes.
    rollout_groups: the paper's RBS in groups, that is how many may be
      unfinished at once; None leaves it to the schedule.
    oversample: groups started for each group trained; at least 1.
    evict: whether groups that hold the trainer back are generated anew by the
      newest version instead of waited for.
  """

  max_staleness: int
  prompts_per_batch: int
  rollout_groups: int | None
  oversample: float
  evict: bool


class Schedule:
  """A strategy; it may keep state of its own between calls.

  Attributes:
    name: by which a config chooses it.
    max_staleness: K, the largest lag with which it trains a group.
    balances: whether generators are shared out among versions (Algorithm 1).
    fills: whether legacy generators may then take new groups of their version,
      although others serve the newest.
    mixes_versions: whether live requests take each new version, so that a
      trajectory may hold tokens of several (against C1).
    drops_groups: whether it gives up groups that have started (against C2).
  """

  name: ClassVar[str]
  max_staleness: int
  balances: ClassVar[bool] = False
  fills: bool = False
  mixes_versions: ClassVar[bool] = False
  drops_groups: ClassVar[bool] = False

  def __init__(self, options: Options):
    """Takes what it needs of the options."""

  def state(self) -> dict[str, Any]:
    """What it keeps between calls, JSON-able."""
    return {}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state."""

  def room(self, view: View, version: int) -> int:
    """How many groups may start now with this version.

    The newest version has the most room.
    """
    raise NotImplementedError

  def batch(self, view: View) -> list[int]:
    """The groups to train on now; empty where the step has to wait."""
    raise NotImplementedError

  def to_drop(self, view: View) -> list[int]:
    """Groups to give up, asked after each step has started."""
    return []

  def to_regenerate(self, view: View) -> list[int]:
    """Open groups to start anew at the newest version, asked while held."""
    return []

  def step_started(self, view: View, *, lacked_s: float, step_s: float) -> None:
    """Hears of a step that starts, so that it can adapt.

    Args:
      view: as it is after the batch has been taken.
      lacked_s: how long the trainer stood idle before it for want of groups.
      step_s: how long the step before it took; 0.0 for the first.
    """


def whole_batch(view: View) -> list[int]:
  """All ready groups, once nothing is open and they make a batch."""
  if view.ledger.open or len(view.ledger.ready) < view.batch_size:
    return []
  return [group_id for _, group_id in view.ledger.ready]
