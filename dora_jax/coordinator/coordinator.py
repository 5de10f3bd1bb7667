"""The pure state machine: one event in, the commands that follow from it out.

It knows ids and counts, and neither tokens, JAX, threads nor clocks. The order
within one call: the trainer is fed first, then generators are shared out among
the versions, members of started groups get slots, generators change version,
new groups start, and versions that nothing needs are freed.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from dora_jax.coordinator import (
  balance,
  placement,
  serving,
  stepping,
  surrender,
)
from dora_jax.coordinator import events as ev
from dora_jax.coordinator import fleet as fleet_lib
from dora_jax.coordinator import ledger as ledger_lib
from dora_jax.coordinator import reuse as reuse_lib
from dora_jax.coordinator.schedules import base


class Coordinator:
  """Decides what to generate, by which version, where, and when to train.

  Attributes:
    ledger: where every group is.
    fleet: the generators.
    balancer: what is counted of Algorithm 1.
    schedule: the strategy.
    stop_reason: why the run ended; None while it goes on.
    generated_before: tokens that generators had sampled before the run was
      resumed.
  """

  def __init__(
    self,
    *,
    schedule: base.Schedule,
    balance_settings: balance.Settings,
    group_size: int,
    prompts_per_batch: int,
    num_steps: int,
    max_filtered: int | None = None,
    reuse: reuse_lib.Settings = reuse_lib.NOTHING,
  ):
    """Starts at version 0 with no generator.

    Args:
      schedule: the strategy.
      balance_settings: of Algorithm 1; used where the schedule balances.
      group_size: M, members of a group.
      prompts_per_batch: P, groups that a step consumes.
      num_steps: steps to make before the run ends.
      max_filtered: drops groups that all or none of their members solve, and
        ends the run after so many in a row; None keeps them.
      reuse: how much of what is trained steps take again.
    """
    self.schedule = schedule
    self.ledger = ledger_lib.Ledger(
      group_size=group_size, filters=max_filtered is not None
    )
    self._max_filtered = max_filtered
    self.fleet = fleet_lib.Fleet()
    self._placement = placement.Placement(self.fleet, self.ledger)
    self.balancer = balance.Balancer(
      balance_settings, fleet=self.fleet, placement=self._placement
    )
    self._view = base.View(
      ledger=self.ledger, prompts_per_batch=prompts_per_batch
    )
    self._num_wanted = num_steps * prompts_per_batch
    self._num_steps = num_steps
    self._num_groups: int | None = None
    self._stepping = stepping.Stepping(schedule, self._view, reuse)
    self._surrender = surrender.Surrender(self._view, self._placement)
    self._serving = serving.Serving(
      schedule=schedule,
      view=self._view,
      fleet=self.fleet,
      placement=self._placement,
      balancer=self.balancer,
    )
    self._may_train = False
    self._trigger: str | None = None
    self._is_stopping: str | None = None
    self.stop_reason: str | None = None
    self.generated_before = 0

  @property
  def max_staleness(self) -> int:
    """K, by which the schedule bounds the lag."""
    return self.schedule.max_staleness

  @property
  def newest_version(self) -> int:
    """The newest version that exists."""
    return self._view.newest_version

  @property
  def versions_alive_max(self) -> int:
    """Most versions alive at once, as `versions_alive` counts."""
    return self._serving.versions_alive_max

  @property
  def trainer_wait_s(self) -> dict[str, float]:
    """Cause -> seconds in which the trainer stood idle; see `stepping`."""
    return self._stepping.wait_s

  @property
  def reused_lag_counts(self) -> collections.Counter[int]:
    """Lag in versions -> groups that steps have taken again."""
    return self._stepping.reuse.lag_counts

  def handle(self, event: ev.Event, now_s: float) -> list[ev.Command]:
    """Takes one event and returns the commands that follow from it.

    Args:
      event: what has happened.
      now_s: when, in seconds of any clock that never runs backwards.

    Raises:
      ValueError: the event contradicts what was commanded, for example a
        trajectory of another version, or finished twice.
    """
    if self.stop_reason is not None and not isinstance(event, ev.Resumed):
      return []
    self._stepping.note_time(now_s)
    commands = self._note(event, now_s)
    if self._surrender.stranded:
      commands += self._note_restart(self._surrender.free_stranded())
    self._count_left_to_start()
    commands += self._end(now_s)
    if self.stop_reason is None:
      if self._may_train:
        commands += self._train(now_s)
      if self._trigger is not None:
        trigger, self._trigger = self._trigger, None
        commands += self._serving.share_out(trigger, now_s)
      commands += self._serving.seat_waiting(
        now_s, but=self._surrender.regenerating
      )
      commands += self._serving.load(now_s)
      if self._is_stopping is None:
        commands += self._serving.start_groups(now_s)
      commands += self._serving.release()
    return commands

  def _note(self, event: ev.Event, now_s: float) -> list[ev.Command]:
    """Brings the state up to date; commands that follow at once."""
    match event:
      case ev.Finished():
        return self._note_finished(event, now_s)
      case ev.Scored():
        request = event.group_id, event.member
        if not self._surrender.is_unwanted(request):
          group = self.ledger.score(
            *request, is_solved=event.is_solved, at=self.newest_version
          )
          return self._note_settled(group)
      case ev.ScoreFailed():
        request = event.group_id, event.member
        if not self._surrender.is_unwanted(request):
          group = self.ledger.fail(
            *request, event.reason, at=self.newest_version
          )
          return self._note_settled(group)
      case ev.Progress():
        self._note_progress(event, now_s)
      case ev.Moved():
        self._note_moved(event, now_s)
      case ev.Cancelled():
        return self._note_cancelled(event, now_s)
      case ev.Loaded():
        self._note_loaded(event, now_s)
      case ev.StepDone():
        self._note_step_done(event, now_s)
      case ev.StepSkipped():
        self._note_step_skipped(event, now_s)
      case ev.Tick():
        if self.balancer.is_due(now_s):
          self._trigger = "period"
      case ev.GeneratorJoined():
        self._note_joined(event, now_s)
      case ev.GeneratorLost():
        return self._note_lost(event, now_s)
      case ev.VersionLost():
        self._note_version_lost(event)
      case ev.Resumed():
        return self._note_resumed(event, now_s)
      case ev.DataExhausted():
        self._note_data_end(event)
      case ev.StopRequested():
        self._is_stopping = event.reason
    return []

  def _note_joined(self, event: ev.GeneratorJoined, now_s: float) -> None:
    self.fleet.add(
      fleet_lib.GeneratorView(
        generator_id=event.generator_id,
        num_slots=event.num_slots,
        mesh_id=event.mesh_id,
        kv_capacity=event.kv_capacity,
        since_s=now_s,
      )
    )
    self._serving.note_changed(event.generator_id)

  def _note_finished(
    self, event: ev.Finished, now_s: float
  ) -> list[ev.Command]:
    if event.generator_id not in self.fleet:
      return []  # It was lost, and its requests are generated anew.
    view = self.fleet[event.generator_id]
    request = event.group_id, event.member
    self._leave(view, request, now_s)
    if request in self._placement.cancelling:
      return self._end_cancel(request, event.num_tokens)
    group = self.ledger.finish(
      *request, generator_id=event.generator_id, num_tokens=event.num_tokens
    )
    if group.version not in self.ledger.num_generating:
      self._serving.must_release = True
    is_right = event.version == group.version or (
      self.schedule.mixes_versions and event.version > group.version
    )
    if not is_right:
      raise ValueError(
        f"Group {group.group_id} belongs to version {group.version}, but its "
        f"member {event.member} finished with version {event.version}."
      )
    return [ev.Score(group_id=event.group_id, member=event.member)]

  def _leave(
    self,
    view: fleet_lib.GeneratorView,
    request: fleet_lib.Member,
    now_s: float,
  ) -> None:
    view.residents.pop(request, None)
    if not view.residents:
      view.kv_tokens = view.num_waiting = 0
    self.fleet.update(view, now_s)
    if view.is_idle():
      self._serving.note_changed(view.generator_id)

  def _note_settled(
    self, group: ledger_lib.OpenGroup | None
  ) -> list[ev.Command]:
    if group is None:
      return []
    self._may_train = self._serving.must_release = True
    if group.rejected is None:
      return []
    if self._max_filtered and (
      self.ledger.num_filtered_in_row >= self._max_filtered
    ):
      self._is_stopping = "nothing_to_learn"
    return [ev.Drop(group_id=group.group_id, reason=group.rejected)]

  def _note_progress(self, event: ev.Progress, now_s: float) -> None:
    if event.generator_id not in self.fleet:
      return
    view = self.fleet[event.generator_id]
    view.kv_tokens = event.num_kv_tokens
    view.num_sampled = event.num_sampled
    view.num_waiting = event.num_waiting
    view.kv_used_share = event.pages_used / max(event.num_pages, 1)
    self.fleet.update(view, now_s)
    if self.balancer.note_pressure(view.mesh_id, view.kv_used_share):
      self._trigger = "kv_pressure"

  def _note_moved(self, event: ev.Moved, now_s: float) -> None:
    lost = self._placement.arrive(event, now_s)
    self.ledger.num_moved += len(event.moved)
    self.ledger.tokens.moved += event.num_kv_tokens
    if lost:
      self._put_back(lost)
      self._trigger = self._trigger or "lost"
    for generator_id in (event.source_id, event.target_id):
      if generator_id in self.fleet and self.fleet[generator_id].is_idle():
        self._serving.note_changed(generator_id)

  def _note_cancelled(
    self, event: ev.Cancelled, now_s: float
  ) -> list[ev.Command]:
    commands: list[ev.Command] = []
    for group_id, member, num_tokens in event.cancelled:
      request = group_id, member
      if event.generator_id in self.fleet:
        self._leave(self.fleet[event.generator_id], request, now_s)
      if request in self._placement.cancelling:
        commands += self._end_cancel(request, num_tokens)
    return commands

  def _end_cancel(
    self, request: fleet_lib.Member, num_tokens: int
  ) -> list[ev.Command]:
    return self._note_restart(self._surrender.end_cancel(request, num_tokens))

  def _note_restart(self, commands: list[ev.Command]) -> list[ev.Command]:
    """Looks out for a place for groups that start anew."""
    if any(isinstance(command, ev.Restart) for command in commands):
      self._may_train = self._serving.must_release = True
      self._trigger = self._trigger or "regenerated"
    return commands

  def _note_loaded(self, event: ev.Loaded, now_s: float) -> None:
    if event.generator_id not in self.fleet:
      return
    view = self.fleet[event.generator_id]
    if view.loading != event.version:
      raise ValueError(
        f"Generator {event.generator_id} loaded version {event.version}, "
        f"but was asked for {view.loading}."
      )
    view.version, view.loading, view.leaving_for = event.version, None, None
    self.ledger.tokens.reprefilled += event.num_reprefilled
    self.fleet.update(view, now_s)
    self._serving.note_changed(event.generator_id)
    self._serving.must_release = True

  def _note_step_done(self, event: ev.StepDone, now_s: float) -> None:
    self._stepping.end(event, now_s)
    self._serving.note_version()
    self._may_train = True
    if self.balancer.settings.on_step:
      self._trigger = "step"

  def _note_step_skipped(self, event: ev.StepSkipped, now_s: float) -> None:
    self._stepping.skip(event, now_s)
    self._may_train = self._serving.must_release = True
    self._serving.note_idle()
    if self._stepping.num_skipped_in_row >= stepping.MOST_SKIPPED:
      self._is_stopping = "steps_skipped"

  def _note_lost(
    self, event: ev.GeneratorLost, now_s: float
  ) -> list[ev.Command]:
    """Lets the requests of a lost generator wait for another."""
    view = self.fleet.remove(event.generator_id, now_s)
    self._serving.note_lost(event.generator_id)
    commands: list[ev.Command] = []
    lost = []
    for request in view.residents:
      if request in self._placement.cancelling:
        commands += self._end_cancel(request, 0)
      elif request not in self._placement.in_transit:
        lost.append(request)
    self._put_back(lost)
    self._trigger, self._serving.must_release = "lost", True
    self._serving.note_idle()
    if not len(self.fleet):
      self._is_stopping = "generators_lost"
    return commands

  def _note_resumed(self, event: ev.Resumed, now_s: float) -> list[ev.Command]:
    """Forgets the generators; asks anew for what was under way.

    A run that had stopped, for whatever reason, goes on if it can.
    """
    self.stop_reason = self._is_stopping = None
    for view in list(self.fleet):
      self.fleet.remove(view.generator_id, now_s)
    versions = {self.newest_version, *event.versions}
    self.balancer.resume()
    self._serving.resume(versions)
    # Live requests of a schedule that mixes versions go on under any.
    if self.schedule.mixes_versions:
      versions |= {group.version for group in self.ledger.open.values()}
    commands = self._surrender.resume(versions)
    self.generated_before = self.ledger.tokens.generated
    self._may_train = True
    return [*commands, *self._stepping.resume()]

  def _put_back(self, requests: Sequence[fleet_lib.Member]) -> None:
    for group_id, member in requests:
      group = self.ledger.open.get(group_id)
      if group is not None and member in group.running:
        self.ledger.put_back(group, [member])
        self._surrender.wait_anew(group)
        self._serving.note_idle()

  def _note_version_lost(self, event: ev.VersionLost) -> None:
    if event.version >= self.newest_version:
      raise ValueError(
        f"Version {event.version} is lost, but the newest, "
        f"{self.newest_version}, and what is newer cannot be."
      )
    # Where versions are mixed, live requests go on under the newest anyway.
    if not self.schedule.mixes_versions:
      self._surrender.lose_version(event.version)

  def _note_data_end(self, event: ev.DataExhausted) -> None:
    if event.num_groups < self.ledger.next_group_id:
      raise ValueError(
        f"The data ends after {event.num_groups} groups, but "
        f"{self.ledger.next_group_id} have started."
      )
    self._num_groups = event.num_groups
    self._may_train = True

  def _count_left_to_start(self) -> None:
    """Counts groups that may still start before the run or its data ends."""
    left = self._num_wanted - self.ledger.num_committed()
    if self._num_groups is not None:
      left = min(left, self._num_groups - self.ledger.next_group_id)
    self._view.num_left_to_start = max(0, left)

  def _end(self, now_s: float) -> list[ev.Command]:
    """Ends the run where it is finished, or where it was asked to end."""
    view = self._view
    if view.is_training:
      return []
    if self._is_stopping is not None:
      # What is unfinished stays as it is, for a run that resumes this one.
      self.stop_reason = self._is_stopping
    elif self._placement.cancelling or self._placement.in_transit:
      return []  # What they have to report is still to be accounted for.
    elif view.newest_version == self._num_steps:
      self.stop_reason = "finished"
    elif not view.num_left_to_start and not (
      self.ledger.open or self.ledger.ready
    ):
      self.stop_reason = "data_exhausted"
    else:
      return []
    self.fleet.settle_waits(now_s)
    return [ev.Stop(reason=self.stop_reason)]

  def _train(self, now_s: float) -> list[ev.Command]:
    """Starts a step if it can be; else has done what would let it start."""
    if self._view.is_training or self._is_stopping is not None:
      return []
    self._may_train = False
    train = self._stepping.start(now_s)
    if train is None:
      return self._regenerate()
    commands: list[ev.Command] = [train]
    for group_id in self.schedule.to_drop(self._view):
      commands += self._surrender.drop(group_id, "oversampled")
    self._count_left_to_start()
    self._serving.must_release = True
    return commands

  def _regenerate(self) -> list[ev.Command]:
    """Starts anew what holds the trainer back, where the schedule does so."""
    commands: list[ev.Command] = []
    if self._stepping.is_held():
      for group_id in self.schedule.to_regenerate(self._view):
        restart = self._surrender.regenerate(group_id, surrender.EVICTED)
        if restart is None:
          self._may_train = True  # Asked again at the next event.
        else:
          commands += self._note_restart(restart)
    return commands

  def versions_alive(self) -> list[int]:
    """The newest version and those of unfinished groups; oldest first."""
    return self._serving.versions_alive()

  def waits(self) -> list[tuple[str, str]]:
    """Says who waits for what, as pairs, for the progress view."""
    return [*self._stepping.waits(), *self._serving.waits()]

  def versions_held(self) -> list[int]:
    """Versions that are not yet released, oldest first."""
    return self._serving.versions_held()

  def under_way(self) -> list[ev.Command]:
    """What has been commanded and is not yet answered, to command it again.

    Each generator is first given the version that it serves already, of which
    no Loaded may be heard.

    Raises:
      ValueError: groups have been given up or generated anew, for which
        something may be under way that nobody can ask for again.
    """
    if (
      self.schedule.drops_groups
      or self.ledger.num_regenerated
      or self._placement.cancelling
    ):
      raise ValueError(
        "Groups had been given up or generated anew before the checkpoint was "
        "made: what was under way for them cannot be asked for again."
      )
    commands: list[ev.Command] = []
    for view in self.fleet:
      version = view.version if view.loading is None else view.loading
      if version is not None:
        commands.append(
          ev.Load(generator_id=view.generator_id, version=version)
        )
    for group in self.ledger.open.values():
      for generator_id in sorted(set(group.running.values())):
        members = [m for m, g in group.running.items() if g == generator_id]
        commands.append(
          ev.Submit(
            generator_id=generator_id,
            group_id=group.group_id,
            members=tuple(members),
            version=group.version,
          )
        )
    for (source_id, target_id), requests in self._placement.moves.items():
      version = self.fleet[source_id].version
      assert version is not None, "what is moved from keeps its version"
      commands.append(
        ev.Move(
          source_id=source_id,
          target_id=target_id,
          version=version,
          requests=requests,
        )
      )
    for group in self.ledger.open.values():
      commands += [
        ev.Score(group_id=group.group_id, member=member)
        for member in sorted(group.unscored)
      ]
    return [*commands, *self._stepping.resume()]

  def snapshot(self) -> dict[str, Any]:
    """The state as JSON-able data, from which `restore` goes on.

    Its size does not grow with the run.
    """
    return {
      "newest_version": self.newest_version,
      "is_training": self._view.is_training,
      "versions_alive": self.versions_alive(),
      "num_left_to_start": self._view.num_left_to_start,
      "num_groups": self._num_groups,
      "is_stopping": self._is_stopping,
      "stop_reason": self.stop_reason,
      "generated_before": self.generated_before,
      "may_train": self._may_train,
      "ledger": self.ledger.state(),
      "placement": self._placement.state(),
      "surrender": self._surrender.state(),
      "serving": self._serving.state(),
      "stepping": self._stepping.state(),
      "balancer": self.balancer.state(),
      "schedule": self.schedule.state(),
      "fleet": self.fleet.state(),
    }

  def restore(self, snapshot: Mapping[str, Any]) -> None:
    """Goes on from a snapshot as the coordinator would have that it is of.

    In another process nothing of what was commanded is still under way: either
    Resumed comes first, or all of `under_way` is commanded there again.

    Args:
      snapshot: of a coordinator with the same arguments, but that `num_steps`
        may differ; after JSON or not.
    """
    view = self._view
    view.newest_version = snapshot["newest_version"]
    view.is_training = snapshot["is_training"]
    view.num_left_to_start = snapshot["num_left_to_start"]
    self._num_groups = snapshot["num_groups"]
    self._is_stopping = snapshot["is_stopping"]
    self.stop_reason = snapshot["stop_reason"]
    self.generated_before = snapshot["generated_before"]
    self._may_train = snapshot["may_train"]
    self.ledger.restore(snapshot["ledger"])
    self._placement.restore(snapshot["placement"])
    self._surrender.restore(snapshot["surrender"])
    self._serving.restore(snapshot["serving"])
    self._stepping.restore(snapshot["stepping"])
    self.balancer.restore(snapshot["balancer"])
    self.schedule.restore(snapshot["schedule"])
    self.fleet.restore(snapshot["fleet"])
