"""Groups that are given up, or generated anew.

What runs for them is cancelled. Until a generator has confirmed that, the
request keeps its slot, and its Finished may still come.
"""

from collections.abc import Collection, Mapping
from typing import Any

from dora_jax.coordinator import events as ev
from dora_jax.coordinator import fleet as fleet_lib
from dora_jax.coordinator import ledger as ledger_lib
from dora_jax.coordinator import placement
from dora_jax.coordinator.schedules import base

# Why a group is generated anew.
EVICTED = "evicted"
VERSION_LOST = "version_lost"
RESUMED = "resumed"


class Surrender:
  """Carries out what a schedule gives up, and accounts for it.

  Attributes:
    regenerating: group_id -> members whose Cancel is under way, of groups that
      start anew after the last of them.
    stranded: group_id -> None, of groups that have to start anew, as no copy of
      their version is left, and that cannot yet.
  """

  def __init__(self, view: base.View, placement: placement.Placement):
    self._view = view
    self._placement = placement
    self._unwanted_scores: set[fleet_lib.Member] = set()
    self._lost_versions: set[int] = set()
    self.regenerating: dict[int, int] = {}
    self.stranded: dict[int, None] = {}

  def state(self) -> dict[str, Any]:
    """All of it, JSON-able."""
    return {
      "unwanted_scores": sorted(map(list, self._unwanted_scores)),
      "regenerating": [list(pair) for pair in self.regenerating.items()],
      "lost_versions": sorted(self._lost_versions),
      "stranded": list(self.stranded),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state."""
    self._unwanted_scores = set(map(tuple, state["unwanted_scores"]))
    self.regenerating = dict(map(tuple, state["regenerating"]))
    self._lost_versions = set(state["lost_versions"])
    self.stranded = dict.fromkeys(state["stranded"])

  def resume(self, versions: Collection[int]) -> list[ev.Command]:
    """Puts right what was under way when the process before this one ended.

    Nothing runs any more. What was being cancelled is gone; rewards that were
    out are asked for again. An unfinished group goes on where its version can
    be served, and else starts anew at the newest one: a group has one version.

    Args:
      versions: that can be served.
    """
    self._unwanted_scores.clear()
    self._placement.in_transit.clear()
    self._placement.moves.clear()
    # What is saved can be served, and all else starts anew here.
    self._lost_versions.clear()
    self.stranded.clear()
    commands: list[ev.Command] = []
    for request in list(self._placement.cancelling):
      commands += self.end_cancel(request, 0)
    for group in self._view.ledger.open.values():
      self._view.ledger.put_back(group, list(group.running))
      if group.waiting and group.version not in versions:
        group.unscored.clear()
        commands += self._restart(group, RESUMED)
      elif group.waiting:
        self._placement.waiting[group.version][group.group_id] = group
      commands += [
        ev.Score(group_id=group.group_id, member=member)
        for member in sorted(group.unscored)
      ]
    return commands

  def is_unwanted(self, request: fleet_lib.Member) -> bool:
    """Whether this score belongs to a group that is given up; once."""
    if request not in self._unwanted_scores:
      return False
    self._unwanted_scores.remove(request)
    return True

  def drop(self, group_id: int, reason: str) -> list[ev.Command]:
    """Gives up a group, and whatever runs for it."""
    group = self._view.ledger.drop(group_id, reason)
    commands: list[ev.Command] = []
    if group is not None:
      self._placement.unqueue(group)
      self._unwanted_scores |= {(group_id, m) for m in group.unscored}
      commands += self._cancel(group, reason)
    return [*commands, ev.Drop(group_id=group_id, reason=reason)]

  def lose_version(self, version: int) -> None:
    """Takes note that no generator can serve this version any more."""
    self._lost_versions.add(version)
    for group in self._view.ledger.open.values():
      if group.version == version and (group.running or group.waiting):
        self._placement.unqueue(group)
        self.stranded[group.group_id] = None

  def wait_anew(self, group: ledger_lib.OpenGroup) -> None:
    """Has the waiting members of a group seated again, if they can be."""
    if group.version in self._lost_versions:
      self.stranded[group.group_id] = None
    else:
      self._placement.waiting[group.version][group.group_id] = group

  def free_stranded(self) -> list[ev.Command]:
    """Starts those of the stranded groups anew that can be by now."""
    commands: list[ev.Command] = []
    for group_id in list(self.stranded):
      group = self._view.ledger.open.get(group_id)
      if group is None or group.version not in self._lost_versions:
        del self.stranded[group_id]
        continue
      commands += self.regenerate(group_id, VERSION_LOST) or []
    return commands

  def regenerate(self, group_id: int, reason: str) -> list[ev.Command] | None:
    """Starts an open group anew; None where that has to be asked again.

    A group has to wait while one of its rewards is out, or while a member is on
    its way: one that finished on its way is still spoken of by the Moved to
    come, which must not be taken to mean its successor.
    """
    ledger, in_transit = self._view.ledger, self._placement.in_transit
    group = ledger.open[group_id]
    if group_id in self.regenerating:
      return []
    members = range(ledger.group_size)
    if group.unscored or any((group_id, m) in in_transit for m in members):
      return None
    if not group.running:
      return self._restart(group, reason)
    self.regenerating[group_id] = len(group.running)
    return self._cancel(group, reason)

  def end_cancel(
    self, request: fleet_lib.Member, num_tokens: int
  ) -> list[ev.Command]:
    """Accounts for a cancelled request; restarts its group after the last."""
    reason = self._placement.cancelling.pop(request)
    self._view.ledger.cancelled(reason, num_tokens)
    group_id, member = request
    if group_id not in self.regenerating:
      return []
    group = self._view.ledger.open[group_id]
    del group.running[member]
    self.regenerating[group_id] -= 1
    if self.regenerating[group_id]:
      return []
    del self.regenerating[group_id]
    return self._restart(group, reason)

  def _restart(
    self, group: ledger_lib.OpenGroup, reason: str
  ) -> list[ev.Command]:
    self._placement.unqueue(group)
    self._view.ledger.regenerate(
      group, version=self._view.newest_version, reason=reason
    )
    self.stranded.pop(group.group_id, None)
    self._placement.waiting[group.version][group.group_id] = group
    return [ev.Restart(group_id=group.group_id)]

  def _cancel(
    self, group: ledger_lib.OpenGroup, reason: str
  ) -> list[ev.Command]:
    by_generator: dict[int, list[fleet_lib.Member]] = {}
    for member, generator_id in group.running.items():
      request = group.group_id, member
      self._placement.cancelling[request] = reason
      by_generator.setdefault(generator_id, []).append(request)
    return [
      ev.Cancel(generator_id=generator_id, requests=tuple(requests))
      for generator_id, requests in by_generator.items()
    ]
