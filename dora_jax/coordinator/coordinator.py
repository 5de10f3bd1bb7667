"""The pure state machine: one event in, the commands that follow from it out.

It knows ids and counts, and neither tokens, JAX, threads nor clocks. The order
within one call: the trainer is fed first, then generators are shared out among
the versions, members of started groups get slots, generators change version,
new groups start, and versions that nothing needs are freed.
"""

from collections.abc import Sequence
from typing import Any

from dora_jax.coordinator import balance, placement
from dora_jax.coordinator import events as ev
from dora_jax.coordinator import fleet as fleet_lib
from dora_jax.coordinator import ledger as ledger_lib
from dora_jax.coordinator.schedules import base


class Coordinator:
  """Decides what to generate, by which version, where, and when to train.

  Attributes:
    ledger: where every group is.
    fleet: the generators.
    balancer: what is counted of Algorithm 1.
    schedule: the strategy.
    stop_reason: why the run ended; None while it goes on.
    versions_alive_max: most versions alive at once, as `versions_alive` counts.
    trainer_wait_s: seconds in which the trainer stood idle, by cause: "data",
      or "straggler" where R1 alone held back a batch that was there.
  """

  def __init__(
    self,
    *,
    schedule: base.Schedule,
    balance_settings: balance.Settings,
    group_size: int,
    prompts_per_batch: int,
    num_steps: int,
  ):
    """Starts at version 0 with no generator.

    Args:
      schedule: the strategy.
      balance_settings: of Algorithm 1; used where the schedule balances.
      group_size: M, members of a group.
      prompts_per_batch: P, groups that a step consumes.
      num_steps: steps to make before the run ends.
    """
    self.schedule = schedule
    self.ledger = ledger_lib.Ledger(group_size=group_size)
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
    self._held = {0}
    # Scores to disregard, as their groups were given up.
    self._unwanted_scores: set[fleet_lib.Member] = set()
    # Groups to start anew once their last running member is cancelled.
    self._regenerating: dict[int, int] = {}
    self._changed: dict[int, None] = {}
    self._may_train = self._must_release = False
    self._trigger: str | None = None
    self._is_stopping: str | None = None
    self._idle_since_s: float | None = None
    self._held_since_s: float | None = None
    self._step_started_s = 0.0
    self._step_s = 0.0
    self.stop_reason: str | None = None
    self.versions_alive_max = 1
    self.trainer_wait_s = {"data": 0.0, "straggler": 0.0}

  @property
  def max_staleness(self) -> int:
    """K, by which the schedule bounds the lag."""
    return self.schedule.max_staleness

  @property
  def newest_version(self) -> int:
    """The newest version that exists."""
    return self._view.newest_version

  def handle(self, event: ev.Event, now_s: float) -> list[ev.Command]:
    """Takes one event and returns the commands that follow from it.

    Args:
      event: what has happened.
      now_s: when, in seconds of any clock that never runs backwards.

    Raises:
      ValueError: the event contradicts what was commanded, for example a
        trajectory of another version, or finished twice.
    """
    if self.stop_reason is not None:
      return []
    if self._idle_since_s is None and not self._view.is_training:
      self._idle_since_s = now_s
    commands = self._note(event, now_s)
    self._view.is_draining = self._num_left_to_start() == 0
    commands += self._end(now_s)
    if self.stop_reason is None:
      if self._may_train:
        commands += self._train(now_s)
      commands += self._share_out(now_s)
      commands += self._seat_waiting(now_s)
      if self._changed:
        commands += self._load(now_s)
      commands += self._start_groups(now_s)
      if self._must_release:
        commands += self._release()
    return commands

  def _note(self, event: ev.Event, now_s: float) -> list[ev.Command]:
    """Brings the state up to date; commands that follow at once."""
    match event:
      case ev.Finished():
        return self._note_finished(event, now_s)
      case ev.Scored():
        request = event.group_id, event.member
        if request in self._unwanted_scores:
          self._unwanted_scores.remove(request)
        else:
          group = self.ledger.score(*request, at=self.newest_version)
          return self._note_settled(group)
      case ev.ScoreFailed():
        request = event.group_id, event.member
        if request in self._unwanted_scores:
          self._unwanted_scores.remove(request)
        else:
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
      case ev.Tick():
        if self.balancer.is_due(now_s):
          self._trigger = "period"
      case ev.GeneratorJoined():
        self._note_joined(event, now_s)
      case ev.GeneratorLost():
        return self._note_lost(event, now_s)
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
    self._changed[event.generator_id] = None

  def _note_finished(
    self, event: ev.Finished, now_s: float
  ) -> list[ev.Command]:
    if event.generator_id not in self.fleet:
      return []  # It was lost, and its requests are generated anew.
    view = self.fleet[event.generator_id]
    request = event.group_id, event.member
    self._leave(view, request, now_s)
    if request in self._placement.cancelling:
      return self._end_cancel(request, event.num_tokens, now_s)
    group = self.ledger.finish(
      *request, generator_id=event.generator_id, num_tokens=event.num_tokens
    )
    if group.version not in self.ledger.num_generating:
      self._must_release = True
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
      self._changed[view.generator_id] = None

  def _note_settled(
    self, group: ledger_lib.OpenGroup | None
  ) -> list[ev.Command]:
    if group is None:
      return []
    self._may_train = self._must_release = True
    if not group.failures:
      return []
    return [ev.Drop(group_id=group.group_id, reason=group.failures[0])]

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
        self._changed[generator_id] = None

  def _note_cancelled(
    self, event: ev.Cancelled, now_s: float
  ) -> list[ev.Command]:
    commands: list[ev.Command] = []
    for group_id, member, num_tokens in event.cancelled:
      request = group_id, member
      if event.generator_id in self.fleet:
        self._leave(self.fleet[event.generator_id], request, now_s)
      if request in self._placement.cancelling:
        commands += self._end_cancel(request, num_tokens, now_s)
    return commands

  def _end_cancel(
    self, request: fleet_lib.Member, num_tokens: int, now_s: float
  ) -> list[ev.Command]:
    """Accounts for a cancelled request; restarts its group after the last."""
    self.ledger.cancelled(self._placement.cancelling.pop(request), num_tokens)
    group_id, member = request
    if group_id not in self._regenerating:
      return []
    group = self.ledger.open[group_id]
    del group.running[member]
    self._regenerating[group_id] -= 1
    if self._regenerating[group_id]:
      return []
    del self._regenerating[group_id]
    return self._restart(group)

  def _restart(self, group: ledger_lib.OpenGroup) -> list[ev.Command]:
    self._placement.unqueue(group)
    self.ledger.regenerate(group, version=self.newest_version)
    self._placement.waiting[group.version][group.group_id] = group
    self._may_train = self._must_release = True
    self._trigger = self._trigger or "regenerated"
    return [ev.Restart(group_id=group.group_id)]

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
    self._changed[event.generator_id] = None
    self._must_release = True

  def _note_step_done(self, event: ev.StepDone, now_s: float) -> None:
    view = self._view
    if not view.is_training or event.version != view.newest_version + 1:
      raise ValueError(
        f"A step made version {event.version}, but version "
        f"{view.newest_version + 1} was to come"
        f"{'' if view.is_training else ', and no step was under way'}."
      )
    self.ledger.commit()
    view.newest_version = event.version
    view.is_training = False
    self._held.add(event.version)
    self._step_s = now_s - self._step_started_s
    self._idle_since_s = now_s
    self._may_train = self._must_release = True
    if self.schedule.mixes_versions:
      self._changed |= dict.fromkeys(v.generator_id for v in self.fleet)
    else:
      self._note_idle()
    if self.balancer.settings.on_step:
      self._trigger = "step"

  def _note_lost(
    self, event: ev.GeneratorLost, now_s: float
  ) -> list[ev.Command]:
    """Lets the requests of a lost generator wait for another."""
    view = self.fleet.remove(event.generator_id, now_s)
    self._changed.pop(event.generator_id, None)
    commands: list[ev.Command] = []
    lost = []
    for request in view.residents:
      if request in self._placement.cancelling:
        commands += self._end_cancel(request, 0, now_s)
      elif request not in self._placement.in_transit:
        lost.append(request)
    self._put_back(lost)
    self._trigger, self._must_release = "lost", True
    self._note_idle()
    if not len(self.fleet):
      self._is_stopping = "generators_lost"
    return commands

  def _note_idle(self) -> None:
    """Has all idle generators looked at again."""
    self._changed |= dict.fromkeys(v.generator_id for v in self.fleet.idle())

  def _put_back(self, requests: Sequence[fleet_lib.Member]) -> None:
    for group_id, member in requests:
      group = self.ledger.open.get(group_id)
      if group is not None and member in group.running:
        self.ledger.put_back(group, [member])
        self._placement.waiting[group.version][group_id] = group
        self._note_idle()

  def _note_data_end(self, event: ev.DataExhausted) -> None:
    if event.num_groups < self.ledger.next_group_id:
      raise ValueError(
        f"The data ends after {event.num_groups} groups, but "
        f"{self.ledger.next_group_id} have started."
      )
    self._num_groups = event.num_groups
    self._may_train = True

  def _num_left_to_start(self) -> int:
    """Groups that may still start before the run or its data ends."""
    left = self._num_wanted - self.ledger.num_committed()
    if self._num_groups is not None:
      left = min(left, self._num_groups - self.ledger.next_group_id)
    return max(0, left)

  def _end(self, now_s: float) -> list[ev.Command]:
    """Ends the run where it is finished, or where it was asked to end."""
    view = self._view
    if view.is_training:
      return []
    if self._is_stopping is not None:
      self.stop_reason = self._is_stopping
      self.ledger.abandon("stopped")
    elif view.newest_version == self._num_steps:
      self.stop_reason = "finished"
    elif view.is_draining and not (self.ledger.open or self.ledger.ready):
      self.stop_reason = "data_exhausted"
    else:
      return []
    self.fleet.settle_waits(now_s)
    return [ev.Stop(reason=self.stop_reason)]

  def _train(self, now_s: float) -> list[ev.Command]:
    if self._view.is_training or self._is_stopping is not None:
      return []
    self._may_train = False
    group_ids = self.schedule.batch(self._view)
    if not group_ids:
      return self._note_held(now_s)
    step = self.newest_version
    self.ledger.take(group_ids, step=step)
    self._check_lags(step)
    self._view.is_training = True
    self._must_release = True
    idle_since_s = now_s if self._idle_since_s is None else self._idle_since_s
    held_since_s = now_s if self._held_since_s is None else self._held_since_s
    self.trainer_wait_s["straggler"] += now_s - held_since_s
    self.trainer_wait_s["data"] += held_since_s - idle_since_s
    self._idle_since_s = self._held_since_s = None
    self._step_started_s = now_s
    self.schedule.step_started(
      self._view, waited_s=now_s - idle_since_s, step_s=self._step_s
    )
    commands: list[ev.Command] = [
      ev.Train(step=step, group_ids=tuple(group_ids))
    ]
    for group_id in self.schedule.to_drop(self._view):
      commands += self._drop(group_id, "oversampled")
    self._view.is_draining = self._num_left_to_start() == 0
    return commands

  def _note_held(self, now_s: float) -> list[ev.Command]:
    """Notes that the trainer waits although a batch is there, if it does."""
    if not len(self.ledger.ready) >= self._view.batch_size > 0:
      return []
    if self._held_since_s is None:
      self._held_since_s = now_s
    commands: list[ev.Command] = []
    for group_id in self.schedule.to_regenerate(self._view):
      group = self.ledger.open[group_id]
      is_busy = group.unscored or group_id in self._regenerating
      # Of all members: one that finished on its way is still spoken of by the
      # Moved to come, which must not be taken to mean its successor.
      in_transit = self._placement.in_transit
      members = range(self.ledger.group_size)
      if is_busy or any((group_id, m) in in_transit for m in members):
        self._may_train = True  # Asked again at the next event.
        continue
      if group.running:
        self._regenerating[group_id] = len(group.running)
        commands += self._cancel(group, "evicted")
      else:
        commands += self._restart(group)
    return commands

  def _drop(self, group_id: int, reason: str) -> list[ev.Command]:
    """Gives up a group, and whatever runs for it."""
    group = self.ledger.drop(group_id, reason)
    commands: list[ev.Command] = []
    if group is not None:
      self._placement.unqueue(group)
      self._unwanted_scores |= {(group_id, m) for m in group.unscored}
      commands += self._cancel(group, reason)
    return [*commands, ev.Drop(group_id=group_id, reason=reason)]

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

  def _check_lags(self, step: int) -> None:
    """Asserts C3 where it counts: at the moment of training."""
    for group_id, version in self.ledger.in_batch.items():
      if not 0 <= step - version <= self.schedule.max_staleness:
        raise ValueError(
          f"Group {group_id} of version {version} would be trained at step "
          f"{step}: lag {step - version} is outside of 0 … "
          f"{self.schedule.max_staleness}."
        )

  def _share_out(self, now_s: float) -> list[ev.Command]:
    trigger, self._trigger = self._trigger, None
    if trigger is None or not self.schedule.balances or not len(self.fleet):
      return []
    num_left = self._num_left_to_start()
    room = min(self.schedule.room(self._view, self.newest_version), num_left)
    num_new = max(room * self.ledger.group_size, int(num_left > 0))
    moves = self.balancer.share_out(
      trigger,
      newest_version=self.newest_version,
      num_new=num_new,
      now_s=now_s,
    )
    self._note_idle()
    return list(moves)

  def _seat_waiting(self, now_s: float) -> list[ev.Command]:
    commands: list[ev.Command] = []
    for version in sorted(self._placement.waiting):
      serving = self.newest_version if self.schedule.mixes_versions else version
      if not self.fleet.num_free(serving):
        continue
      for group in list(self._placement.waiting[version].values()):
        if group.group_id in self._regenerating:
          continue
        commands += self._placement.seat(group, version=serving, now_s=now_s)
        if not self.fleet.num_free(serving):
          break
    return commands

  def _load(self, now_s: float) -> list[ev.Command]:
    """Gives a version to generators that can take one."""
    commands: list[ev.Command] = []
    orphans = [
      version
      for version in sorted(self._placement.waiting)
      if version != self.newest_version and self.fleet.is_orphaned(version)
    ]
    # First those that an orphaned version is meant for.
    by_promise = sorted(
      self._changed, key=lambda g: self.fleet[g].leaving_for is None
    )
    for generator_id in by_promise:
      view = self.fleet[generator_id]
      carries = self.schedule.mixes_versions and view.num_live > 0
      if view.loading is not None or not (carries or view.is_idle()):
        continue
      version = self._next_version(view, orphans)
      if view.version == version:
        view.leaving_for = None
        self.fleet.update(view, now_s)
        continue
      view.version, view.loading = None, version
      view.leaving_for = None
      self.fleet.update(view, now_s)
      commands.append(
        ev.Load(
          generator_id=generator_id, version=version, carries_live=carries
        )
      )
    self._changed.clear()
    self._must_release = self._must_release or bool(commands)
    return commands

  def _next_version(
    self, view: fleet_lib.GeneratorView, orphans: list[int]
  ) -> int:
    """What an empty generator serves next: usually the newest version."""
    if self.schedule.mixes_versions:
      return self.newest_version
    if view.leaving_for in self._placement.waiting:
      assert view.leaving_for is not None
      if view.leaving_for in orphans:
        orphans.remove(view.leaving_for)
      return view.leaving_for
    return orphans.pop(0) if orphans else self.newest_version

  def _start_groups(self, now_s: float) -> list[ev.Command]:
    """Starts new groups, the newest version first, each with a free slot."""
    commands: list[ev.Command] = []
    versions = self.fleet.versions_with_room()
    num_left = self._num_left_to_start()
    if self._is_stopping is not None or not (versions and num_left):
      return commands
    # At most events nothing may start: asked once, as no version has more room.
    if self.schedule.room(self._view, self.newest_version) <= 0:
      return commands
    for version in versions:
      room = min(self.schedule.room(self._view, version), num_left)
      if room <= 0 or not self._may_fill(version):
        continue
      while room > 0 and self.fleet.num_free(version):
        group = self.ledger.start(version)
        commands += self._placement.seat(group, version=version, now_s=now_s)
        room -= 1
        num_left -= 1
    if commands:
      self._view.is_draining = self._num_left_to_start() == 0
      self._must_release = True
    return commands

  def _may_fill(self, version: int) -> bool:
    """Whether a version may take new groups.

    Where generators are shared out among versions, the newest may. A legacy one
    may fill its idle slots, but not the oldest, which has to end for the window
    to slide; unless nobody serves the newest version yet, for then there is
    nothing fresher to fill them with.
    """
    if version == self.newest_version or not self.schedule.balances:
      return True
    if not self.balancer.settings.filling:
      return False
    if not self.fleet.is_served(self.newest_version):
      return True
    return version > min(self.ledger.num_unfinished, default=version)

  def _release(self) -> list[ev.Command]:
    """Frees versions that no request, generator or later Load can need."""
    self._must_release = False
    self.versions_alive_max = max(
      self.versions_alive_max, len(self.versions_alive())
    )
    if len(self._held) == 1:
      return []
    needed = {self.newest_version, *self.ledger.num_generating}
    released = sorted(self._held.difference(needed, self.fleet.versions_held()))
    self._held -= set(released)
    for version in released:
      self.fleet.forget(version)
    return [ev.Release(version=version) for version in released]

  def versions_alive(self) -> list[int]:
    """The newest version and those of unfinished groups; oldest first."""
    return sorted({self.newest_version, *self.ledger.num_unfinished})

  def waits(self) -> list[tuple[str, str]]:
    """Says who waits for what, as pairs, for the progress view."""
    pairs = []
    if not self._view.is_training:
      lacking = self._view.batch_size - len(self.ledger.ready)
      oldest = min(
        self.ledger.open.values(), key=lambda g: g.version, default=None
      )
      if lacking > 0:
        pairs.append(("trainer", f"{lacking} more groups"))
      elif oldest is not None:
        pairs.append(
          ("trainer", f"group {oldest.group_id} of version {oldest.version}")
        )
    for view in self.fleet:
      if view.waits_for == "weights":
        pairs.append(
          (f"generator {view.generator_id}", f"version {view.loading}")
        )
      elif view.waits_for is not None:
        pairs.append((f"generator {view.generator_id}", view.waits_for))
    return pairs

  def snapshot(self) -> dict[str, Any]:
    """The state as JSON-able data, written beside the report of a stall."""
    ledger = self.ledger
    return {
      "newest_version": self.newest_version,
      "is_training": self._view.is_training,
      "versions_alive": self.versions_alive(),
      "next_group_id": ledger.next_group_id,
      "num_trained": ledger.num_trained,
      "dropped": dict(ledger.dropped),
      # Not asdict(), which rebuilds a Counter wrongly.
      "tokens": {
        **vars(ledger.tokens),
        "dropped": dict(ledger.tokens.dropped),
      },
      "in_batch": sorted(ledger.in_batch),
      "ready": [list(entry) for entry in ledger.ready],
      "in_transit": [[*r, to] for r, to in self._placement.in_transit.items()],
      "cancelling": [list(r) for r in self._placement.cancelling],
      "open": [
        {
          "group_id": group.group_id,
          "version": group.version,
          "waiting": group.waiting,
          "running": {str(m): g for m, g in group.running.items()},
          "unscored": sorted(group.unscored),
        }
        for group in ledger.open.values()
      ],
      "generators": [
        {**vars(view), "residents": [list(r) for r in view.residents]}
        for view in self.fleet
      ],
    }
