"""Which version each generator serves, what starts on it, which are freed."""

from collections.abc import Collection, Mapping
from typing import Any

from dora_jax.coordinator import balance, placement
from dora_jax.coordinator import events as ev
from dora_jax.coordinator import fleet as fleet_lib
from dora_jax.coordinator.schedules import base


class Serving:
  """Decides for the generators; all its steps follow from the state alone.

  Attributes:
    versions_alive_max: most versions alive at once, as `versions_alive` counts.
    must_release: whether a version may have become free.
  """

  def __init__(
    self,
    *,
    schedule: base.Schedule,
    view: base.View,
    fleet: fleet_lib.Fleet,
    placement: placement.Placement,
    balancer: balance.Balancer,
  ):
    self._schedule = schedule
    self._view = view
    self._ledger = view.ledger
    self._fleet = fleet
    self._placement = placement
    self._balancer = balancer
    self._held = {0}
    # Generators to look at, since they may take another version.
    self._changed: dict[int, None] = {}
    self.must_release = False
    self.versions_alive_max = 1

  def state(self) -> dict[str, Any]:
    """All of it, JSON-able, between two events."""
    return {
      "held": sorted(self._held),
      "versions_alive_max": self.versions_alive_max,
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state."""
    self._held = set(state["held"])
    self.versions_alive_max = state["versions_alive_max"]

  def resume(self, versions: Collection[int]) -> None:
    """Begins without generators; the store holds these versions."""
    self._changed.clear()
    self._held = set(versions)
    self.must_release = True

  def note_changed(self, generator_id: int) -> None:
    """Has a generator looked at again."""
    self._changed[generator_id] = None

  def note_idle(self) -> None:
    """Has all idle generators looked at again."""
    for view in self._fleet.idle():
      self._changed[view.generator_id] = None

  def note_lost(self, generator_id: int) -> None:
    """Forgets a generator."""
    self._changed.pop(generator_id, None)

  def note_version(self) -> None:
    """Takes in the newest version, which has just been made."""
    self._held.add(self._view.newest_version)
    self.must_release = True
    if self._schedule.mixes_versions:
      for view in self._fleet:
        self._changed[view.generator_id] = None
    else:
      self.note_idle()

  def share_out(self, trigger: str, now_s: float) -> list[ev.Command]:
    """Shares the generators out among the versions (Algorithm 1)."""
    view = self._view
    if not self._schedule.balances or not len(self._fleet):
      return []
    room = min(
      self._schedule.room(view, view.newest_version), view.num_left_to_start
    )
    num_new = max(
      room * self._ledger.group_size, int(view.num_left_to_start > 0)
    )
    moves = self._balancer.share_out(
      trigger,
      newest_version=view.newest_version,
      num_new=num_new,
      now_s=now_s,
    )
    self.note_idle()
    return list(moves)

  def seat_waiting(
    self, now_s: float, *, but: dict[int, int]
  ) -> list[ev.Command]:
    """Gives slots to members of started groups, `but` those, oldest first."""
    commands: list[ev.Command] = []
    for version in sorted(self._placement.waiting):
      serving = version
      if self._schedule.mixes_versions:
        serving = self._view.newest_version
      if not self._fleet.num_free(serving):
        continue
      for group in list(self._placement.waiting[version].values()):
        if group.group_id in but:
          continue
        commands += self._placement.seat(group, version=serving, now_s=now_s)
        if not self._fleet.num_free(serving):
          break
    return commands

  def load(self, now_s: float) -> list[ev.Command]:
    """Gives a version to generators that can take one."""
    if not self._changed:
      return []
    commands: list[ev.Command] = []
    orphans = [
      version
      for version in sorted(self._placement.waiting)
      if version != self._view.newest_version
      and self._fleet.is_orphaned(version)
    ]
    # First those that an orphaned version is meant for.
    by_promise = sorted(
      self._changed, key=lambda g: self._fleet[g].leaving_for is None
    )
    for generator_id in by_promise:
      view = self._fleet[generator_id]
      carries = self._schedule.mixes_versions and view.num_live > 0
      if view.loading is not None or not (carries or view.is_idle()):
        continue
      version = self._next_version(view, orphans)
      view.leaving_for = None
      if view.version != version:
        view.version, view.loading = None, version
        commands.append(
          ev.Load(
            generator_id=generator_id, version=version, carries_live=carries
          )
        )
      self._fleet.update(view, now_s)
    self._changed.clear()
    self.must_release = self.must_release or bool(commands)
    return commands

  def _next_version(
    self, view: fleet_lib.GeneratorView, orphans: list[int]
  ) -> int:
    """What an empty generator serves next: usually the newest version."""
    if self._schedule.mixes_versions:
      return self._view.newest_version
    if view.leaving_for in self._placement.waiting:
      assert view.leaving_for is not None
      if view.leaving_for in orphans:
        orphans.remove(view.leaving_for)
      return view.leaving_for
    return orphans.pop(0) if orphans else self._view.newest_version

  def start_groups(self, now_s: float) -> list[ev.Command]:
    """Starts new groups, the newest version first, each with a free slot."""
    commands: list[ev.Command] = []
    view, versions = self._view, self._fleet.versions_with_room()
    if not (versions and view.num_left_to_start):
      return commands
    # At most events nothing may start: asked once, as no version has more room.
    if self._schedule.room(view, view.newest_version) <= 0:
      return commands
    for version in versions:
      room = min(self._schedule.room(view, version), view.num_left_to_start)
      if room <= 0 or not self._may_fill(version):
        continue
      while room > 0 and self._has_seats(version):
        group = self._ledger.start(version)
        commands += self._placement.seat(group, version=version, now_s=now_s)
        room -= 1
        view.num_left_to_start -= 1
    self.must_release = self.must_release or bool(commands)
    return commands

  def _has_seats(self, version: int) -> bool:
    """Whether a group may start for the slots that are free.

    Members without a slot wait for one of their version, and keep a generator
    from the next version for as long as they then run: so where generators
    change one by one, a group starts when all of it can. Half of a generator is
    enough, lest groups as large as it wait until it is empty.
    """
    emptiest = self._fleet.emptiest(version)
    if emptiest is None or not self._schedule.balances:
      return emptiest is not None
    needed = min(self._ledger.group_size, max(1, emptiest.num_slots // 2))
    return self._fleet.num_free(version) >= needed

  def _may_fill(self, version: int) -> bool:
    """Whether a version may take new groups.

    Where generators are shared out among versions, the newest may. A legacy one
    may fill its idle slots, but not the oldest, which has to end for the window
    to slide; unless nobody serves the newest version yet, for then there is
    nothing fresher to fill them with.
    """
    newest_version = self._view.newest_version
    if version == newest_version or not self._schedule.balances:
      return True
    if not self._fleet.is_served(newest_version):
      return self._balancer.settings.filling
    if not (self._balancer.settings.filling and self._schedule.fills):
      return False
    return version > min(self._ledger.num_unfinished, default=version)

  def release(self) -> list[ev.Command]:
    """Frees versions that no request, generator or later Load can need."""
    if not self.must_release:
      return []
    self.must_release = False
    self.versions_alive_max = max(
      self.versions_alive_max, len(self.versions_alive())
    )
    if len(self._held) == 1:
      return []
    needed = {self._view.newest_version, *self._ledger.num_generating}
    released = sorted(
      self._held.difference(needed, self._fleet.versions_held())
    )
    self._held -= set(released)
    for version in released:
      self._fleet.forget(version)
    return [ev.Release(version=version) for version in released]

  def versions_held(self) -> list[int]:
    """Versions that are not yet released, oldest first."""
    return sorted(self._held)

  def versions_alive(self) -> list[int]:
    """The newest version and those of unfinished groups; oldest first."""
    return sorted({self._view.newest_version, *self._ledger.num_unfinished})

  def waits(self) -> list[tuple[str, str]]:
    """What each generator waits for, in words."""
    pairs = []
    for view in self._fleet:
      who = f"generator {view.generator_id}"
      if view.waits_for == "weights":
        pairs.append((who, f"version {view.loading}"))
      elif view.waits_for is not None:
        pairs.append((who, view.waits_for))
    return pairs
