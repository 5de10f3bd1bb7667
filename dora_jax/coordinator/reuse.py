"""Which trained groups a step takes again, beside its new ones.

The ledger accounts for a group once: with the step that first trains on it. To
be taken again is no transition of the ledger, so that neither exactly-once nor
the rules of the window know of it; it is counted here. C3 holds all the same.
Source: the replay buffer with a reuse ratio of LongCat-Flash-Thinking
(https://arxiv.org/abs/2509.18883).
"""

import collections
import dataclasses
import zlib
from collections.abc import Collection, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How much is taken again.

  Attributes:
    groups_per_step: most groups that a step takes again.
    max_uses: steps that may train on a group, the first one included.
  """

  groups_per_step: int
  max_uses: int


NOTHING = Settings(groups_per_step=0, max_uses=1)


class Reuse:
  """Remembers what may be taken again, and decides what is.

  Attributes:
    lag_counts: lag in versions -> groups taken again.
  """

  def __init__(self, settings: Settings, *, max_staleness: int):
    """Remembers nothing yet.

    Args:
      settings: how much is taken again.
      max_staleness: K, which bounds the lag here too.
    """
    self._settings = settings
    self._max_staleness = max_staleness
    # group_id -> its version, and the steps that have trained on it.
    self._versions: dict[int, int] = {}
    self._uses: collections.Counter[int] = collections.Counter()
    self.lag_counts: collections.Counter[int] = collections.Counter()

  def state(self) -> dict[str, Any]:
    """All of it, JSON-able."""
    return {
      "versions": [list(pair) for pair in self._versions.items()],
      "uses": [list(pair) for pair in self._uses.items()],
      "lag_counts": [list(pair) for pair in self.lag_counts.items()],
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state."""
    self._versions = dict(map(tuple, state["versions"]))
    self._uses = collections.Counter(dict(state["uses"]))
    self.lag_counts = collections.Counter(dict(state["lag_counts"]))

  def take(self, step: int) -> tuple[int, ...]:
    """The groups that this step takes again, in order of their ids.

    Those that fewest steps have trained on come first; among these the draw is
    by chance, but the same for the same step: neither old nor new ones are
    preferred.
    """
    self._forget(step)
    drawn = sorted(
      self._versions,
      key=lambda group_id: (self._uses[group_id], _shuffled(step, group_id)),
    )
    taken = sorted(drawn[: self._settings.groups_per_step])
    for group_id in taken:
      self._uses[group_id] += 1
      self.lag_counts[step - self._versions[group_id]] += 1
    return tuple(taken)

  def remember(self, batch: Mapping[int, int]) -> None:
    """Keeps the new groups of a step that starts: group_id -> version."""
    if not self._settings.groups_per_step:
      return
    for group_id, version in batch.items():
      self._versions[group_id] = version
      self._uses[group_id] = 1

  def withdraw(
    self, step: int, new_ids: Collection[int], reused_ids: Collection[int]
  ) -> None:
    """Forgets all groups of a step that trained on nothing.

    Those taken again too: any of them may be what was wrong with it. What is
    left is what was kept for the steps after it, for no more is there by now.
    """
    self.lag_counts -= collections.Counter(
      step - self._versions[group_id] for group_id in reused_ids
    )
    self._forget(step + 1)
    for group_id in [*new_ids, *reused_ids]:
      self._versions.pop(group_id, None)
      self._uses.pop(group_id, None)

  def kept(self, step: int) -> tuple[int, ...]:
    """Groups that a step after this one may take again."""
    return tuple(
      group_id
      for group_id, version in self._versions.items()
      if self._uses[group_id] < self._settings.max_uses
      and step + 1 - version <= self._max_staleness
    )

  def _forget(self, step: int) -> None:
    """Lets go of what may not be taken at this step."""
    kept = self.kept(step - 1)
    self._versions = {g: self._versions[g] for g in kept}
    self._uses = collections.Counter({g: self._uses[g] for g in kept})


def _shuffled(step: int, group_id: int) -> int:
  """A number without order, by which groups of a step are drawn."""
  return zlib.crc32(f"{step}/{group_id}".encode())
