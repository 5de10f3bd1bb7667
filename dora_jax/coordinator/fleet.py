"""The generators as the coordinator knows them, indexed by version and load.

Every question that an event asks is answered in O(log n) of the fleet: which
generator of a version is the emptiest, which ones stand idle, how many slots of
a version are free.
"""

import collections
import dataclasses
import heapq
from collections.abc import Iterator, Mapping
from typing import Any

Member = tuple[int, int]


@dataclasses.dataclass(kw_only=True, eq=False)
class GeneratorView:
  """A generator as the coordinator knows it.

  Attributes:
    generator_id: its id.
    num_slots: requests that it can run at once.
    mesh_id: its mesh, which lanes share.
    kv_capacity: tokens whose KV its mesh holds.
    version: what it serves; None before its first load.
    loading: the version that it is being given, if any.
    leaving_for: the version that it is to serve once it is empty, if any.
    residents: (group_id, member) that it runs, in order of arrival.
    num_incoming: requests on their way to it.
    num_outgoing: of its residents, those on their way elsewhere.
    kv_tokens: token positions that its residents hold, as last reported.
    num_sampled: tokens that it has sampled, as last reported.
    kv_used_share: share of its mesh's pages in use, as last reported.
    num_waiting: requests that wait for pages, as last reported.
    since_s: since when it is in the state that `waits_for` names.
    waits_for: "prompts", "weights" or "pages"; None while it decodes.
  """

  generator_id: int
  num_slots: int
  mesh_id: int
  kv_capacity: int
  version: int | None = None
  loading: int | None = None
  leaving_for: int | None = None
  residents: dict[Member, None] = dataclasses.field(default_factory=dict)
  num_incoming: int = 0
  num_outgoing: int = 0
  kv_tokens: int = 0
  num_sampled: int = 0
  kv_used_share: float = 0.0
  num_waiting: int = 0
  since_s: float = 0.0
  waits_for: str | None = "prompts"
  # What the indexes hold of it, and the mark of its entry in a heap.
  indexed_free: int = 0
  indexed_version: int | None = None
  indexed_pledge: int | None = None
  indexed_promise: int | None = None
  mark: int = 0

  @property
  def num_live(self) -> int:
    """Requests that it runs or is about to get."""
    return len(self.residents) + self.num_incoming

  def num_free(self) -> int:
    """Slots that can take a request now."""
    if self.loading is not None or self.leaving_for is not None:
      return 0
    return self.num_slots - self.num_live

  def is_idle(self) -> bool:
    """Whether it could take another version at once."""
    return self.loading is None and self.num_live == 0

  def pledge(self) -> int | None:
    """The version that it serves, or will serve next if that is settled."""
    if self.loading is not None:
      return self.loading
    return self.version if self.leaving_for is None else self.leaving_for

  def state(self) -> dict[str, Any]:
    """All of it but what the indexes hold of it, JSON-able."""
    return {
      **{name: getattr(self, name) for name in _SAVED},
      "residents": [list(request) for request in self.residents],
    }

  @classmethod
  def from_state(cls, state: Mapping[str, Any]) -> "GeneratorView":
    """The view of which `state` was taken, in no index yet."""
    residents = dict.fromkeys(map(tuple, state["residents"]))
    return cls(**{**state, "residents": residents})

  def is_pinned(self) -> bool:
    """Whether something is on its way, so that it must keep its version."""
    return (
      self.loading is not None or self.num_incoming > 0 or self.num_outgoing > 0
    )


_SAVED = [
  field.name
  for field in dataclasses.fields(GeneratorView)
  if not field.name.startswith("indexed_")
]


class Fleet:
  """All generators that have joined and are not lost.

  Attributes:
    wait_s: cause -> seconds that generators spent without decoding.
  """

  def __init__(self) -> None:
    self._views: dict[int, GeneratorView] = {}
    self._idle: dict[int, None] = {}
    self._free: collections.Counter[int] = collections.Counter()
    self._serving: collections.Counter[int] = collections.Counter()
    self._pledged: collections.Counter[int] = collections.Counter()
    # Of these, by generators that are still to run empty.
    self._promised: collections.Counter[int] = collections.Counter()
    # version -> (load, mark, generator_id) of generators with free slots;
    # entries whose mark is not the view's are out of date.
    self._heaps: dict[int, list[tuple[float, int, int]]] = {}
    self._mark = 0
    self.wait_s = {"prompts": 0.0, "weights": 0.0, "pages": 0.0}

  def __len__(self) -> int:
    return len(self._views)

  def __iter__(self) -> Iterator[GeneratorView]:
    return iter(self._views.values())

  def __getitem__(self, generator_id: int) -> GeneratorView:
    if generator_id not in self._views:
      raise ValueError(
        f"Generator {generator_id} is spoken of, but {len(self._views)} "
        "others are known: it has not joined, or was lost."
      )
    return self._views[generator_id]

  def __contains__(self, generator_id: int) -> bool:
    return generator_id in self._views

  def state(self) -> dict[str, Any]:
    """All of it, JSON-able."""
    return {
      "generators": [view.state() for view in self],
      "idle": list(self._idle),
      "mark": self._mark,
      "wait_s": dict(self.wait_s),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state; only for a fleet that has no generator yet."""
    views = [GeneratorView.from_state(each) for each in state["generators"]]
    self._views = {view.generator_id: view for view in views}
    # Indexed in the order of their last changes, which `emptiest` goes by.
    for view in sorted(views, key=lambda view: view.mark):
      self._mark = view.mark - 1
      view.mark = 0
      self._index(view, view.num_free())
      promise = view.leaving_for if view.loading is None else None
      self._pledge(view, view.pledge(), promise)
    self._mark = state["mark"]
    self._idle = dict.fromkeys(state["idle"])
    self.wait_s = dict(state["wait_s"])

  def add(self, view: GeneratorView) -> None:
    """Takes in a generator that has joined."""
    if view.generator_id in self._views:
      raise ValueError(f"Generator {view.generator_id} has joined twice.")
    self._views[view.generator_id] = view
    self.update(view, view.since_s)

  def remove(self, generator_id: int, now_s: float) -> GeneratorView:
    """Forgets a generator that is lost."""
    view = self[generator_id]
    self._settle_wait(view, now_s)
    self._unindex(view)
    self._pledge(view, None, None)
    self._idle.pop(generator_id, None)
    del self._views[generator_id]
    return view

  def update(self, view: GeneratorView, now_s: float) -> None:
    """Brings the indexes up to date after a change of this view."""
    num_free = view.num_free()
    if num_free != view.indexed_free or view.version != view.indexed_version:
      self._unindex(view)
      self._index(view, num_free)
    pledge = view.pledge()
    promise = view.leaving_for if view.loading is None else None
    if (pledge, promise) != (view.indexed_pledge, view.indexed_promise):
      self._pledge(view, pledge, promise)
    if view.is_idle():
      self._idle[view.generator_id] = None
    else:
      self._idle.pop(view.generator_id, None)
    waits_for = _waits_for(view)
    if waits_for != view.waits_for:
      self._settle_wait(view, now_s)
      view.waits_for = waits_for

  def settle_waits(self, now_s: float) -> None:
    """Counts the waits up to now of those that still wait."""
    for view in self:
      self._settle_wait(view, now_s)

  def idle(self) -> list[GeneratorView]:
    """Those that could take another version at once."""
    return [self._views[generator_id] for generator_id in self._idle]

  def num_free(self, version: int) -> int:
    """Free slots of generators that serve a version."""
    return self._free.get(version, 0)

  def num_serving(self, version: int) -> int:
    """Generators that serve a version, those about to leave it included."""
    return self._serving.get(version, 0)

  def is_served(self, version: int) -> bool:
    """Whether a generator serves a version to stay, or will serve it next."""
    return version in self._pledged

  def is_orphaned(self, version: int) -> bool:
    """Whether none serves a version, but those that are to run empty first."""
    return self._pledged.get(version, 0) == self._promised.get(version, 0)

  def versions_held(self) -> set[int]:
    """Versions that generators serve or are about to."""
    return {*self._serving, *self._pledged}

  def versions_with_room(self) -> list[int]:
    """Versions with free slots, the newest first."""
    return sorted(self._free, reverse=True)

  def emptiest(self, version: int) -> GeneratorView | None:
    """The generator of a version with the largest share of free slots.

    Among equals, the one whose load has not changed for longest, so that no
    generator is always first.
    """
    heap = self._heaps.get(version)
    while heap:
      _, mark, generator_id = heap[0]
      view = self._views.get(generator_id)
      if view is not None and view.mark == mark:
        return view
      heapq.heappop(heap)
    return None

  def _unindex(self, view: GeneratorView) -> None:
    version = view.indexed_version
    view.mark = 0
    if version is None:
      return
    _subtract(self._free, version, view.indexed_free)
    _subtract(self._serving, version, 1)
    view.indexed_free, view.indexed_version = 0, None

  def _index(self, view: GeneratorView, num_free: int) -> None:
    version = view.version
    if version is None:
      return
    view.indexed_free, view.indexed_version = num_free, version
    self._serving[version] += 1
    if not num_free:
      return
    self._free[version] += num_free
    self._mark += 1
    view.mark = self._mark
    heap = self._heaps.setdefault(version, [])
    load = 1.0 - num_free / view.num_slots
    heapq.heappush(heap, (load, view.mark, view.generator_id))
    if len(heap) > 4 * self._serving[version] + 64:
      self._compact(version)

  def _compact(self, version: int) -> None:
    """Drops the entries that are out of date, so that a heap stays small."""
    self._heaps[version] = [
      entry
      for entry in self._heaps[version]
      if entry[2] in self._views and self._views[entry[2]].mark == entry[1]
    ]
    heapq.heapify(self._heaps[version])

  def forget(self, version: int) -> None:
    """Drops the index of a version that nobody serves any more."""
    self._heaps.pop(version, None)

  def _pledge(
    self, view: GeneratorView, pledge: int | None, promise: int | None
  ) -> None:
    for counts, old, new in (
      (self._pledged, view.indexed_pledge, pledge),
      (self._promised, view.indexed_promise, promise),
    ):
      if old is not None:
        _subtract(counts, old, 1)
      if new is not None:
        counts[new] += 1
    view.indexed_pledge, view.indexed_promise = pledge, promise

  def _settle_wait(self, view: GeneratorView, now_s: float) -> None:
    if view.waits_for is not None:
      self.wait_s[view.waits_for] += now_s - view.since_s
    view.since_s = now_s


def _waits_for(view: GeneratorView) -> str | None:
  if view.loading is not None:
    return "weights"
  if not view.residents:
    return "prompts"
  return "pages" if view.num_waiting >= len(view.residents) else None


def _subtract(
  counts: collections.Counter[int], version: int, amount: int
) -> None:
  """Leaves no zeros behind: versions come and go for ever."""
  counts[version] -= amount
  if not counts[version]:
    del counts[version]
