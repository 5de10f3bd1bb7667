"""Algorithm 1 at work: when to share generators out anew, and what moves then.

Source: DORA, arXiv 2604.26256, section 4.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from dora_jax.coordinator import events as ev
from dora_jax.coordinator import fleet as fleet_lib
from dora_jax.coordinator import partition, placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What of Algorithm 1 is used, and when.

  Attributes:
    repartition: whether generators are shared out by live requests; without it
      a generator changes version only once it is empty.
    moves: whether live requests are carried away from one that shall change.
    filling: whether legacy generators, but for the oldest version's, may take
      new groups of their own version.
    on_step: whether to share out after each step.
    kv_pressure: share of a mesh's pages in use from which to share out;
      above 1 never.
    period_s: seconds between two looks by the clock; 0 never.
    weight_bytes: of one version.
    kv_token_bytes: KV of one token.
  """

  repartition: bool
  moves: bool
  filling: bool
  on_step: bool
  kv_pressure: float
  period_s: float
  weight_bytes: int
  kv_token_bytes: int


class Balancer:
  """Decides which generators change version.

  Attributes:
    counts: trigger -> times that generators were shared out for it.
  """

  def __init__(
    self,
    settings: Settings,
    *,
    fleet: fleet_lib.Fleet,
    placement: placement.Placement,
  ):
    self.settings = settings
    self.counts: collections.Counter[str] = collections.Counter()
    self._fleet = fleet
    self._placement = placement
    self._last_s = 0.0
    self._pressed: set[int] = set()

  def state(self) -> dict[str, Any]:
    """All of it, JSON-able."""
    return {
      "counts": dict(self.counts),
      "last_s": self._last_s,
      "pressed": sorted(self._pressed),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state."""
    self.counts = collections.Counter(state["counts"])
    self._last_s = state["last_s"]
    self._pressed = set(state["pressed"])

  def resume(self) -> None:
    """Forgets which meshes were short of pages: nothing runs."""
    self._pressed.clear()

  def note_pressure(self, mesh_id: int, kv_used_share: float) -> bool:
    """Says whether a mesh's KV pressure has just passed the threshold."""
    if kv_used_share < self.settings.kv_pressure:
      self._pressed.discard(mesh_id)
      return False
    was_pressed = mesh_id in self._pressed
    self._pressed.add(mesh_id)
    return not was_pressed

  def is_due(self, now_s: float) -> bool:
    """Says whether the period has passed."""
    period_s = self.settings.period_s
    return period_s > 0 and now_s - self._last_s >= period_s

  def share_out(
    self, trigger: str, *, newest_version: int, num_new: int, now_s: float
  ) -> list[ev.Move]:
    """Shares the generators out anew.

    Args:
      trigger: why, for the count.
      newest_version: which new groups get.
      num_new: requests of the newest version that are about to start.
      now_s: now.

    Returns:
      The moves; generators that are to change have `leaving_for` set.
    """
    self.counts[trigger] += 1
    self._last_s = now_s
    moves: list[ev.Move] = []
    if self.settings.repartition:
      targets = self._targets(newest_version, num_new)
      moves = self._leave(targets, now_s)
    if num_new or newest_version in self._placement.waiting:
      self._make_way(newest_version, now_s)
    return moves

  def _targets(self, newest_version: int, num_new: int) -> dict[int, int]:
    """generator_id -> the version that it is to serve."""
    live: collections.Counter[int] = collections.Counter()
    kv_tokens: collections.Counter[int] = collections.Counter()
    current: collections.Counter[int] = collections.Counter()
    for view in self._fleet:
      version = _version(view)
      if version is not None:
        current[version] += 1
      if view.version is not None:
        # A request on its way counts where it goes to.
        live[view.version] += view.num_live - view.num_outgoing
        kv_tokens[view.version] += view.kv_tokens
    for version, groups in self._placement.waiting.items():
      live[version] += sum(len(group.waiting) for group in groups.values())
    live[newest_version] += num_new
    least = self._least(live, kv_tokens)
    least[newest_version] = 1
    counts = partition.replica_counts(
      live, num_generators=len(self._fleet), least=least
    )
    # A legacy version gains no generator that its requests do not need: they
    # only become fewer.
    for version in [v for v in counts if v != newest_version]:
      most = max(current[version], least.get(version, 1))
      surplus = counts[version] - most
      if surplus > 0 and newest_version in counts:
        counts[version] -= surplus
        counts[newest_version] += surplus
    replicas = [
      partition.Replica(
        generator_id=view.generator_id,
        mesh_id=view.mesh_id,
        version=_version(view),
        leave_bytes=view.kv_tokens * self.settings.kv_token_bytes
        + view.num_live,
        is_pinned=view.is_pinned(),
      )
      for view in self._fleet
    ]
    return partition.assign(
      replicas, counts, weight_bytes=self.settings.weight_bytes
    )

  def _least(
    self, live: Mapping[int, int], kv_tokens: Mapping[int, int]
  ) -> dict[int, int]:
    """Generators that each version's requests need for slots and for KV."""
    lanes = collections.Counter(view.mesh_id for view in self._fleet)
    num_slots = min(view.num_slots for view in self._fleet)
    capacity = min(
      view.kv_capacity // lanes[view.mesh_id] for view in self._fleet
    )
    return {
      version: max(
        1,
        -(-num_live // num_slots),
        -(-kv_tokens[version] // max(capacity, 1)),
      )
      for version, num_live in live.items()
    }

  def _leave(self, targets: Mapping[int, int], now_s: float) -> list[ev.Move]:
    """Marks those that leave their version, then finds seats elsewhere."""
    leaving = []
    for view in self._fleet:
      target = targets.get(view.generator_id, view.version)
      if view.version is None or view.is_pinned():
        continue
      leaving_for = None if target == view.version else target
      if leaving_for != view.leaving_for:
        view.leaving_for = leaving_for
        self._fleet.update(view, now_s)
      if view.leaving_for is not None and view.residents:
        leaving.append(view)
    if not self.settings.moves:
      return []
    return [
      move
      for view in leaving
      for move in self._placement.move_away(view, now_s)
    ]

  def _make_way(self, newest_version: int, now_s: float) -> None:
    """Lets one generator run empty where nobody serves the newest version."""
    if self._fleet.is_served(newest_version):
      return
    candidates = [
      view
      for view in self._fleet
      if view.version is not None
      and view.leaving_for is None
      # The only one that could serve waiting members has to stay.
      and (
        view.version not in self._placement.waiting
        or self._fleet.num_serving(view.version) > 1
      )
    ]
    if candidates:
      view = min(candidates, key=lambda v: (v.num_live, v.generator_id))
      view.leaving_for = newest_version
      self._fleet.update(view, now_s)


def _version(view: fleet_lib.GeneratorView) -> int | None:
  """What a generator counts for: what it changes to, once that is certain."""
  return view.pledge() if view.is_pinned() else view.version
