"""Where every group is: running, ready, in batch, trained or dropped.

A transition that is not on the map raises, so that a duplicate or lost event
stops the run instead of training something twice.
"""

import bisect
import collections
import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(kw_only=True)
class OpenGroup:
  """A group that has started and is not yet ready for training.

  Attributes:
    group_id: position in the order of dispatch.
    version: the policy version of all its members.
    waiting: members that no generator has yet, in order.
    running: member -> the generator that has it.
    unscored: members that are finished and wait for their reward.
    num_scored: members whose reward is known.
    failures: why rewards could not be had, in the order in which they failed.
  """

  group_id: int
  version: int
  waiting: list[int]
  running: dict[int, int] = dataclasses.field(default_factory=dict)
  unscored: set[int] = dataclasses.field(default_factory=set)
  num_scored: int = 0
  failures: list[str] = dataclasses.field(default_factory=list)

  def is_settled(self) -> bool:
    """No member waits, runs or lacks its verdict."""
    return not (self.waiting or self.running or self.unscored)


class Ledger:
  """Accounts for groups; decides nothing.

  Attributes:
    group_size: M, members of a group.
    open: running groups by id, in the order of dispatch.
    ready: sorted (version, group_id) of groups that may be trained.
    in_batch: group_id -> version, of the step that is being made.
    num_unfinished: version -> running groups.
    num_untrained: version -> running and ready groups.
    next_group_id: the group that starts next; those before it have started.
    num_trained: groups that a finished step has consumed.
    dropped: reason -> groups that will never be trained.
    lag_counts: lag in versions -> trained trajectories.
  """

  def __init__(self, *, group_size: int):
    self.group_size = group_size
    self.open: dict[int, OpenGroup] = {}
    self.ready: list[tuple[int, int]] = []
    self.in_batch: dict[int, int] = {}
    self.num_unfinished: collections.Counter[int] = collections.Counter()
    self.num_untrained: collections.Counter[int] = collections.Counter()
    self.next_group_id = 0
    self.num_trained = 0
    self.dropped: dict[str, list[int]] = {}
    self.lag_counts: collections.Counter[int] = collections.Counter()

  def num_dropped(self) -> int:
    """Groups dropped, for whatever reason."""
    return sum(len(ids) for ids in self.dropped.values())

  def num_committed(self) -> int:
    """Groups trained, in the running step, or on their way to one."""
    return self.next_group_id - self.num_dropped()

  def start(self, version: int) -> OpenGroup:
    """Starts the next group with this version."""
    group = OpenGroup(
      group_id=self.next_group_id,
      version=version,
      waiting=list(range(self.group_size)),
    )
    self.next_group_id += 1
    self.open[group.group_id] = group
    self.num_unfinished[version] += 1
    self.num_untrained[version] += 1
    return group

  def submit(
    self, group_id: int, generator_id: int, num_members: int
  ) -> tuple[int, ...]:
    """Gives a group's next waiting members to a generator."""
    group = self.open[group_id]
    members = tuple(group.waiting[:num_members])
    del group.waiting[:num_members]
    group.running.update(dict.fromkeys(members, generator_id))
    return members

  def finish(
    self, group_id: int, member: int, *, version: int, generator_id: int
  ) -> None:
    """Notes a member's last token."""
    group = self._group(group_id, "finished")
    if version != group.version:
      raise ValueError(
        f"Group {group_id} belongs to version {group.version}, but its member "
        f"{member} finished with version {version}."
      )
    if group.running.pop(member, None) != generator_id:
      raise ValueError(
        f"Member {member} of group {group_id} finished on generator "
        f"{generator_id}, which does not run it."
      )
    group.unscored.add(member)

  def score(self, group_id: int, member: int) -> str | None:
    """Notes that a member's reward is known; why, if its group is dropped."""
    self._take_unscored(group_id, member).num_scored += 1
    return self._settle(group_id)

  def fail(self, group_id: int, member: int, reason: str) -> str | None:
    """Notes that a member has no reward; why, if its group is dropped."""
    self._take_unscored(group_id, member).failures.append(reason)
    return self._settle(group_id)

  def take(self, group_ids: Iterable[int], *, step: int) -> None:
    """Moves ready groups into the batch of a step."""
    if self.in_batch:
      raise ValueError(f"Step {step} starts while another is being made.")
    for group_id in group_ids:
      index = self._ready_index(group_id)
      version, _ = self.ready.pop(index)
      self.num_untrained[version] -= 1
      self.in_batch[group_id] = version
      self.lag_counts[step - version] += self.group_size

  def commit(self) -> None:
    """Marks the batch as trained."""
    self.num_trained += len(self.in_batch)
    self.in_batch.clear()

  def abandon(self, reason: str) -> None:
    """Drops whatever runs or is ready, at an early end."""
    ids = [*self.open, *(group_id for _, group_id in self.ready)]
    if ids:
      self.dropped.setdefault(reason, []).extend(sorted(ids))
    self.open.clear()
    self.ready.clear()
    self.num_unfinished.clear()
    self.num_untrained.clear()

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

  def _settle(self, group_id: int) -> str | None:
    """Closes a group whose members are all settled; why, if it is dropped."""
    group = self.open[group_id]
    if not group.is_settled():
      return None
    del self.open[group_id]
    self.num_unfinished[group.version] -= 1
    if group.failures:
      self.num_untrained[group.version] -= 1
      self.dropped.setdefault(group.failures[0], []).append(group_id)
      return group.failures[0]
    bisect.insort(self.ready, (group.version, group_id))
    return None

  def _ready_index(self, group_id: int) -> int:
    for index, (_, ready_id) in enumerate(self.ready):
      if ready_id == group_id:
        return index
    raise ValueError(f"Group {group_id} is to be trained, but it is not ready.")
