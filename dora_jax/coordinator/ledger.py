"""Where every group is: running, ready, in batch, trained or dropped.

A transition that is not on the map raises, so that a duplicate or lost event
stops the run instead of training something twice. Tokens are accounted for
along the way: generated = open + ready + in batch + trained + dropped.
"""

import bisect
import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

# Why the filter drops a group.
ALL_SOLVED = "all_solved"
NONE_SOLVED = "none_solved"

# Of a ledger's state, what is a number.
_NUMBERS = (
  "next_group_id",
  "num_trained",
  "num_filtered_in_row",
  "num_regenerated",
  "num_moved",
  "num_generated",
)


@dataclasses.dataclass(kw_only=True, eq=False)
class OpenGroup:
  """A group that has started and is not yet ready for training.

  Attributes:
    group_id: position in the order of dispatch.
    version: the policy version of all its members.
    waiting: members that no generator has yet, in order.
    running: member -> the generator that has it.
    unscored: members that are finished and wait for their reward.
    num_scored: members whose reward is known.
    num_solved: members of those whose reward is that of a solved prompt.
    failures: why rewards could not be had, in the order in which they failed.
    rejected: why the group is not trained on, once it is settled.
    lengths: sampled tokens of its finished members.
  """

  group_id: int
  version: int
  waiting: list[int]
  running: dict[int, int] = dataclasses.field(default_factory=dict)
  unscored: set[int] = dataclasses.field(default_factory=set)
  num_scored: int = 0
  num_solved: int = 0
  rejected: str | None = None
  failures: list[str] = dataclasses.field(default_factory=list)
  lengths: list[int] = dataclasses.field(default_factory=list)

  def is_settled(self) -> bool:
    """No member waits, runs or lacks its verdict."""
    return not (self.waiting or self.running or self.unscored)

  def is_generating(self) -> bool:
    """A member waits or runs."""
    return bool(self.waiting or self.running)

  def state(self) -> dict[str, Any]:
    """All of it, JSON-able; `from_state` makes its equal."""
    return {
      **vars(self),
      "waiting": list(self.waiting),
      "failures": list(self.failures),
      "lengths": list(self.lengths),
      "running": [list(pair) for pair in self.running.items()],
      "unscored": sorted(self.unscored),
    }

  @classmethod
  def from_state(cls, state: Mapping[str, Any]) -> "OpenGroup":
    """The group of which `state` was taken."""
    running = dict(map(tuple, state["running"]))
    unscored = set(state["unscored"])
    return cls(**{**state, "running": running, "unscored": unscored})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClosedGroup:
  """A group that is ready for training or in the batch.

  Attributes:
    version: of its members.
    ready_at: the newest version when it became ready.
    lengths: sampled tokens of its members.
  """

  version: int
  ready_at: int
  lengths: Sequence[int]

  @property
  def num_tokens(self) -> int:
    """Sampled, of all members."""
    return sum(self.lengths)


@dataclasses.dataclass(kw_only=True)
class Tokens:
  """Sampled tokens by where they are; only `open`, `ready`, `in_batch` fall.

  Attributes:
    generated: of finished and cancelled requests.
    open: of finished members whose group is not complete.
    ready: of groups that may be trained.
    in_batch: of the step that is being made.
    trained: of finished steps.
    dropped: reason -> of what will never be trained.
    reprefilled: whose KV was computed again for a live request.
    moved: token positions that moves carried.
  """

  generated: int = 0
  open: int = 0
  ready: int = 0
  in_batch: int = 0
  trained: int = 0
  dropped: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  reprefilled: int = 0
  moved: int = 0

  def check(self) -> None:
    """Asserts that nothing was lost and nothing counted twice."""
    placed = self.open + self.ready + self.in_batch + self.trained
    placed += self.dropped.total()
    if placed != self.generated:
      raise ValueError(
        f"{self.generated} tokens were generated, but {placed} are accounted "
        f"for: {self}."
      )


class Ledger:
  """Accounts for groups; decides nothing.

  Attributes:
    group_size: M, members of a group.
    open: running groups by id, in the order of dispatch.
    ready: sorted (version, group_id) of groups that may be trained.
    in_batch: group_id -> version, of the step that is being made.
    num_generating: version -> groups with members that wait or run; no entry
      where there is none.
    num_unfinished: version -> open groups; likewise.
    num_ready: version -> ready groups; no entry where there is none.
    num_untrained: version -> running and ready groups; likewise.
    next_group_id: the group that starts next; those before it have started.
    num_trained: groups that a finished step has consumed.
    dropped: reason -> groups that will never be trained.
    num_filtered_in_row: groups that the filter has dropped since it last kept
      one.
    num_regenerated: groups that were started anew; see `regenerate`.
    num_moved: requests that moves carried.
    tokens: where the sampled tokens are.
    num_generated: trajectories finished.
    dropped_lengths: reason -> power of two -> trajectories of dropped groups
      with fewer sampled tokens than that, and no fewer than half of it.
    lag_counts: lag in versions -> trained trajectories.
    lag_sums: "in_flight" (from dispatch to ready) and "in_queue" (from ready to
      training): lag in versions, summed over trained trajectories.
  """

  def __init__(self, *, group_size: int, filters: bool = False):
    """Starts with no group.

    Args:
      group_size: M, members of a group.
      filters: whether groups that all or none of their members solve are
        dropped: their advantages are 0.
    """
    self.group_size = group_size
    self._filters = filters
    self.open: dict[int, OpenGroup] = {}
    self.ready: list[tuple[int, int]] = []
    self.in_batch: dict[int, int] = {}
    self.num_generating: dict[int, int] = {}
    self.num_unfinished: dict[int, int] = {}
    self.num_ready: dict[int, int] = {}
    self.num_untrained: dict[int, int] = {}
    self.next_group_id = 0
    self.num_trained = 0
    self.dropped: collections.Counter[str] = collections.Counter()
    self.num_filtered_in_row = 0
    self.num_regenerated = 0
    self.num_moved = 0
    self.tokens = Tokens()
    self.num_generated = 0
    self.dropped_lengths: dict[str, collections.Counter[int]] = {}
    self.lag_counts: collections.Counter[int] = collections.Counter()
    self.lag_sums = {"in_flight": 0, "in_queue": 0}
    # What a group counts for from its start.
    self._counts = (
      self.num_generating,
      self.num_unfinished,
      self.num_untrained,
    )
    self._closed: dict[int, ClosedGroup] = {}
    self._num_dropped = 0

  def is_ready(self, group_id: int) -> bool:
    """Whether a group may be trained, and is not yet in a batch."""
    return group_id in self._closed and group_id not in self.in_batch

  def untrained(self) -> set[int]:
    """Groups that are open, ready or in batch."""
    return {*self.open, *self._closed}

  def num_dropped(self) -> int:
    """Groups dropped, for whatever reason."""
    return self._num_dropped

  def num_committed(self) -> int:
    """Groups trained, in the running step, or on their way to one."""
    return self.next_group_id - self._num_dropped

  def start(self, version: int) -> OpenGroup:
    """Starts the next group with this version."""
    group = OpenGroup(
      group_id=self.next_group_id,
      version=version,
      waiting=list(range(self.group_size)),
    )
    self.next_group_id += 1
    self.open[group.group_id] = group
    for counts in self._counts:
      _add(counts, version, 1)
    return group

  def submit(
    self, group: OpenGroup, generator_id: int, num_members: int
  ) -> tuple[int, ...]:
    """Gives a group's next waiting members to a generator."""
    members = tuple(group.waiting[:num_members])
    del group.waiting[:num_members]
    for member in members:
      group.running[member] = generator_id
    return members

  def put_back(self, group: OpenGroup, members: Collection[int]) -> None:
    """Lets members whose generator is lost wait for another."""
    for member in members:
      del group.running[member]
    group.waiting = sorted({*group.waiting, *members})

  def finish(
    self, group_id: int, member: int, *, generator_id: int, num_tokens: int
  ) -> OpenGroup:
    """Notes a member's last token."""
    group = self._group(group_id, "finished")
    if group.running.pop(member, None) != generator_id:
      raise ValueError(
        f"Member {member} of group {group_id} finished on generator "
        f"{generator_id}, which does not run it."
      )
    if not (group.running or group.waiting):
      _add(self.num_generating, group.version, -1)
    group.unscored.add(member)
    group.lengths.append(num_tokens)
    self.num_generated += 1
    self.tokens.generated += num_tokens
    self.tokens.open += num_tokens
    return group

  def score(
    self,
    group_id: int,
    member: int,
    *,
    at: int,
    is_solved: bool | None = None,
  ) -> OpenGroup | None:
    """Notes that a member's reward is known; its group, if that settles it.

    Args:
      group_id: the group.
      member: of it.
      at: the newest version.
      is_solved: see events.Scored.
    """
    if self._filters and is_solved is None:
      raise ValueError(
        f"Groups are filtered, but nobody says whether member {member} of "
        f"group {group_id} has solved its prompt."
      )
    group = self._take_unscored(group_id, member)
    group.num_scored += 1
    group.num_solved += bool(is_solved)
    return self._settle(group, at)

  def fail(
    self, group_id: int, member: int, reason: str, *, at: int
  ) -> OpenGroup | None:
    """Notes that a member has no reward; its group, if that settles it."""
    group = self._take_unscored(group_id, member)
    group.failures.append(reason)
    return self._settle(group, at)

  def take(self, group_ids: Sequence[int], *, step: int) -> None:
    """Moves ready groups into the batch of a step."""
    if self.in_batch:
      raise ValueError(f"Step {step} starts while another is being made.")
    taken = set(group_ids)
    left = [entry for entry in self.ready if entry[1] not in taken]
    if len(self.ready) - len(left) != len(group_ids):
      raise ValueError(
        f"Step {step} wants {sorted(taken)}, of which only "
        f"{len(self.ready) - len(left)} are ready."
      )
    self.ready = left
    for group_id in group_ids:
      group = self._closed[group_id]
      _add(self.num_untrained, group.version, -1)
      _add(self.num_ready, group.version, -1)
      self.in_batch[group_id] = group.version
      self.tokens.ready -= group.num_tokens
      self.tokens.in_batch += group.num_tokens
      self._count_lag(group, step, self.group_size)

  def commit(self) -> None:
    """Marks the batch as trained."""
    self.num_trained += len(self.in_batch)
    for group_id in self.in_batch:
      num_tokens = self._closed.pop(group_id).num_tokens
      self.tokens.in_batch -= num_tokens
      self.tokens.trained += num_tokens
    self.in_batch.clear()
    self.tokens.check()

  def reject(self, reason: str, *, step: int) -> None:
    """Drops the batch of a step that came to nothing."""
    for group_id in self.in_batch:
      group = self._closed.pop(group_id)
      self.tokens.in_batch -= group.num_tokens
      self._count_lag(group, step, -self.group_size)
      self._count_dropped(reason, group.lengths)
    self.in_batch.clear()
    self.tokens.check()

  def drop(self, group_id: int, reason: str) -> OpenGroup | None:
    """Gives up an open or a ready group; returns it if it was open."""
    if group_id in self.open:
      group = self.open[group_id]
      if group.running or group.waiting:
        _add(self.num_generating, group.version, -1)
      self._close(group)
      _add(self.num_untrained, group.version, -1)
      self._count_dropped(reason, group.lengths)
      return group
    group = self._closed.pop(group_id)
    self.ready.remove((group.version, group_id))
    _add(self.num_ready, group.version, -1)
    _add(self.num_untrained, group.version, -1)
    self.tokens.ready -= group.num_tokens
    self._count_dropped(reason, group.lengths)
    return None

  def cancelled(self, reason: str, num_tokens: int) -> None:
    """Notes what a request of a dropped group had sampled when it ended."""
    self.tokens.generated += num_tokens
    self.tokens.dropped[reason] += num_tokens
    self._count_length(reason, num_tokens)

  def regenerate(self, group: OpenGroup, *, version: int, reason: str) -> None:
    """Starts a group anew, at another version; counts what it had as dropped.

    Its members have finished or wait, and one at least has not finished.
    """
    num_tokens = sum(group.lengths)
    self.tokens.open -= num_tokens
    self.tokens.dropped[reason] += num_tokens
    for length in group.lengths:
      self._count_length(reason, length)
    for counts in self._counts:
      _add(counts, group.version, -1)
      _add(counts, version, 1)
    group.version = version
    group.waiting = list(range(self.group_size))
    group.lengths, group.failures = [], []
    group.num_scored = group.num_solved = 0
    self.num_regenerated += 1

  def state(self) -> dict[str, Any]:
    """All of it, JSON-able; O(groups that are open, ready or in batch)."""
    return {
      **{name: getattr(self, name) for name in _NUMBERS},
      # Not asdict(), which rebuilds a Counter wrongly.
      "tokens": {**vars(self.tokens), "dropped": dict(self.tokens.dropped)},
      "dropped": dict(self.dropped),
      "dropped_lengths": [
        [reason, [list(pair) for pair in counts.items()]]
        for reason, counts in self.dropped_lengths.items()
      ],
      "lag_counts": [list(pair) for pair in self.lag_counts.items()],
      "lag_sums": dict(self.lag_sums),
      "open": [group.state() for group in self.open.values()],
      "closed": [
        [group_id, {**vars(group), "lengths": list(group.lengths)}]
        for group_id, group in self._closed.items()
      ],
      "in_batch": list(self.in_batch),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state that was taken of another ledger."""
    for name in _NUMBERS:
      setattr(self, name, state[name])
    dropped_tokens = collections.Counter(state["tokens"]["dropped"])
    self.tokens = Tokens(**{**state["tokens"], "dropped": dropped_tokens})
    self.dropped = collections.Counter(state["dropped"])
    self._num_dropped = self.dropped.total()
    self.dropped_lengths = {
      reason: collections.Counter(dict(counts))
      for reason, counts in state["dropped_lengths"]
    }
    self.lag_counts = collections.Counter(dict(state["lag_counts"]))
    self.lag_sums = dict(state["lag_sums"])
    groups = map(OpenGroup.from_state, state["open"])
    self.open = {group.group_id: group for group in groups}
    self._closed = {
      group_id: ClosedGroup(**group) for group_id, group in state["closed"]
    }
    self.in_batch = {g: self._closed[g].version for g in state["in_batch"]}
    self.ready = sorted(
      (group.version, group_id)
      for group_id, group in self._closed.items()
      if group_id not in self.in_batch
    )
    self._recount()

  def _recount(self) -> None:
    """Counts groups by version from the groups themselves."""
    for counts in (*self._counts, self.num_ready):
      counts.clear()
    for group in self.open.values():
      _add(self.num_unfinished, group.version, 1)
      _add(self.num_untrained, group.version, 1)
      if group.is_generating():
        _add(self.num_generating, group.version, 1)
    for version, _ in self.ready:
      _add(self.num_ready, version, 1)
      _add(self.num_untrained, version, 1)

  def _group(self, group_id: int, verb: str) -> OpenGroup:
    if group_id not in self.open:
      raise ValueError(f"Group {group_id} {verb}, but it is not running.")
    return self.open[group_id]

  def _take_unscored(self, group_id: int, member: int) -> OpenGroup:
    group = self._group(group_id, "was scored")
    if member not in group.unscored:
      raise ValueError(
        f"Member {member} of group {group_id} was scored, but it does not "
        f"wait for a reward."
      )
    group.unscored.remove(member)
    return group

  def _settle(self, group: OpenGroup, at: int) -> OpenGroup | None:
    """Closes a group whose members are all settled."""
    if not group.is_settled():
      return None
    group.rejected = self._rejection(group)
    if group.rejected is not None:
      self.drop(group.group_id, group.rejected)
      return group
    self.num_filtered_in_row = 0
    self._close(group)
    closed = ClosedGroup(
      version=group.version, ready_at=at, lengths=group.lengths
    )
    self._closed[group.group_id] = closed
    self.tokens.ready += closed.num_tokens
    _add(self.num_ready, group.version, 1)
    bisect.insort(self.ready, (group.version, group.group_id))
    return group

  def _rejection(self, group: OpenGroup) -> str | None:
    """Why a settled group is not to be trained on, if it is not."""
    if group.failures:
      return group.failures[0]
    if not self._filters or 0 < group.num_solved < self.group_size:
      return None
    self.num_filtered_in_row += 1
    return ALL_SOLVED if group.num_solved else NONE_SOLVED

  def _close(self, group: OpenGroup) -> None:
    """Takes a group out of the open ones."""
    del self.open[group.group_id]
    _add(self.num_unfinished, group.version, -1)
    self.tokens.open -= sum(group.lengths)

  def _count_lag(self, group: ClosedGroup, step: int, number: int) -> None:
    _add(self.lag_counts, step - group.version, number)
    in_flight = group.ready_at - group.version
    self.lag_sums["in_flight"] += in_flight * number
    self.lag_sums["in_queue"] += (step - group.ready_at) * number

  def _count_dropped(self, reason: str, lengths: Sequence[int]) -> None:
    self.tokens.dropped[reason] += sum(lengths)
    for length in lengths:
      self._count_length(reason, length)
    self.dropped[reason] += 1
    self._num_dropped += 1

  def _count_length(self, reason: str, num_tokens: int) -> None:
    bucket = 1 << num_tokens.bit_length()
    by_length = self.dropped_lengths.setdefault(reason, collections.Counter())
    by_length[bucket] += 1


def _add(counts: dict[int, int], key: int, change: int) -> None:
  """Counts without leaving zeros behind: versions come and go for ever."""
  left = counts.get(key, 0) + change
  if left:
    counts[key] = left
  else:
    counts.pop(key, None)
