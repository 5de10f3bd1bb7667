"""Which generator serves which members: seats and moves.

Members of one group are kept together where that is possible, since they share
the pages of their prompt; a request stays where it is unless it must go.
"""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from dora_jax.coordinator import events as ev
from dora_jax.coordinator import fleet as fleet_lib
from dora_jax.coordinator import ledger as ledger_lib


class Placement:
  """Seats members on generators, and carries them from one to another.

  Attributes:
    in_transit: (group_id, member) -> its target, of requests on their way.
    cancelling: (group_id, member) -> why, of requests that a Cancel is under
      way for; these stay where they are.
    moves: (source, target) -> the requests of the Move that is under way.
    waiting: version -> groups with members that no generator has, in order.
  """

  def __init__(self, fleet: fleet_lib.Fleet, ledger: ledger_lib.Ledger):
    self._fleet = fleet
    self._ledger = ledger
    self.in_transit: dict[fleet_lib.Member, int] = {}
    self.cancelling: dict[fleet_lib.Member, str] = {}
    self.moves: dict[tuple[int, int], tuple[fleet_lib.Member, ...]] = {}
    self.waiting: dict[int, dict[int, ledger_lib.OpenGroup]] = (
      collections.defaultdict(dict)
    )

  def state(self) -> dict[str, Any]:
    """All of it, JSON-able; groups by their ids."""
    return {
      "in_transit": [[*r, target] for r, target in self.in_transit.items()],
      "moves": [
        [*ends, list(map(list, requests))]
        for ends, requests in self.moves.items()
      ],
      "cancelling": [[*r, reason] for r, reason in self.cancelling.items()],
      "waiting": [[v, list(groups)] for v, groups in self.waiting.items()],
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state, after the ledger has."""
    self.in_transit = {(g, m): target for g, m, target in state["in_transit"]}
    self.moves = {
      (source, target): tuple(map(tuple, requests))
      for source, target, requests in state["moves"]
    }
    self.cancelling = {(g, m): reason for g, m, reason in state["cancelling"]}
    for version, group_ids in state["waiting"]:
      self.waiting[version] = {g: self._ledger.open[g] for g in group_ids}

  def seat(
    self, group: ledger_lib.OpenGroup, *, version: int, now_s: float
  ) -> list[ev.Submit]:
    """Gives slots to as many of a group's waiting members as there are.

    They go to generators that already run members of the group, then to the
    emptiest.

    Args:
      group: with waiting members.
      version: of the generators to look at; the group's own, unless the
        schedule lets requests change versions.
      now_s: now.
    """
    submits = []
    hosts = set(group.running.values()) if group.running else ()
    while group.waiting and self._fleet.num_free(version):
      view = self._host(hosts, version) or self._fleet.emptiest(version)
      assert view is not None, "a version with free slots has a generator"
      count = min(len(group.waiting), view.num_free())
      members = self._ledger.submit(group, view.generator_id, count)
      for member in members:
        view.residents[group.group_id, member] = None
      self._fleet.update(view, now_s)
      submits.append(
        ev.Submit(
          generator_id=view.generator_id,
          group_id=group.group_id,
          members=members,
          version=version,
        )
      )
    if group.waiting:
      self.waiting[group.version][group.group_id] = group
    elif group.version in self.waiting:
      self.unqueue(group)
    return submits

  def unqueue(self, group: ledger_lib.OpenGroup) -> None:
    """Forgets that a group has members to seat, if it had any."""
    groups = self.waiting.get(group.version, {})
    groups.pop(group.group_id, None)
    if not groups:
      self.waiting.pop(group.version, None)

  def move_away(
    self, source: fleet_lib.GeneratorView, now_s: float
  ) -> list[ev.Move]:
    """Orders the residents of a generator to others of its version.

    Those for whom no slot is free stay. The source takes nothing new, which the
    caller sees to.
    """
    version = source.version
    if version is None:
      return []
    by_group: dict[int, list[fleet_lib.Member]] = {}
    for resident in source.residents:
      if resident not in self.in_transit and resident not in self.cancelling:
        by_group.setdefault(resident[0], []).append(resident)
    parcels: dict[int, list[fleet_lib.Member]] = {}
    for group_id, residents in by_group.items():
      group = self._ledger.open.get(group_id)
      hosts = set(group.running.values()) if group is not None else ()
      while residents and self._fleet.num_free(version):
        target = self._host(hosts, version) or self._fleet.emptiest(version)
        assert target is not None, "a version with free slots has a generator"
        count = min(len(residents), target.num_free())
        parcel, residents = residents[:count], residents[count:]
        parcels.setdefault(target.generator_id, []).extend(parcel)
        target.num_incoming += count
        source.num_outgoing += count
        self.in_transit |= dict.fromkeys(parcel, target.generator_id)
        self._fleet.update(target, now_s)
    for target_id, parcel in parcels.items():
      self.moves[source.generator_id, target_id] = tuple(parcel)
    return [
      ev.Move(
        source_id=source.generator_id,
        target_id=target_id,
        version=version,
        requests=tuple(parcel),
      )
      for target_id, parcel in parcels.items()
    ]

  def arrive(self, event: ev.Moved, now_s: float) -> list[fleet_lib.Member]:
    """Takes note of how a move ended.

    Returns:
      Requests that are lost, since the generator that has them is.
    """
    for request in (*event.moved, *event.left):
      if self.in_transit.get(request) not in (event.target_id, None):
        raise ValueError(f"{event} speaks of {request}, which goes elsewhere.")
    self.moves.pop((event.source_id, event.target_id), None)
    moved = [r for r in event.moved if self.in_transit.pop(r, None) is not None]
    left = [r for r in event.left if self.in_transit.pop(r, None) is not None]
    num_ordered = len(event.moved) + len(event.left)
    source = target = None
    if event.source_id in self._fleet:
      source = self._fleet[event.source_id]
      source.num_outgoing -= num_ordered
    if event.target_id in self._fleet:
      target = self._fleet[event.target_id]
      target.num_incoming -= num_ordered
    lost = [] if source is not None else left
    for group_id, member in moved:
      if source is not None:
        source.residents.pop((group_id, member), None)
      if target is None:
        lost.append((group_id, member))
      else:
        target.residents[group_id, member] = None
        group = self._ledger.open.get(group_id)
        if group is not None and member in group.running:
          group.running[member] = event.target_id
    for view in (source, target):
      if view is not None:
        self._fleet.update(view, now_s)
    return lost

  def _host(
    self, hosts: Iterable[int], version: int
  ) -> fleet_lib.GeneratorView | None:
    for generator_id in sorted(hosts):
      if generator_id in self._fleet:
        view = self._fleet[generator_id]
        if view.version == version and view.num_free():
          return view
    return None
