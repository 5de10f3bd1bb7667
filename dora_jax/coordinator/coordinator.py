"""The pure state machine: one event in, the commands that follow from it out.

It knows ids and counts, and neither tokens, JAX, threads nor clocks. The order
within one call: the trainer is fed first, then members of started groups get
slots, then generators change version, then new groups start, then versions that
nothing needs are freed.
"""

import collections
from collections.abc import Iterable, Iterator
from typing import Any

from dora_jax.coordinator import events as ev
from dora_jax.coordinator import ledger as ledger_lib
from dora_jax.coordinator import placement
from dora_jax.coordinator.schedules import base


class Coordinator:
  """Decides what to generate, by which version, where, and when to train.

  Attributes:
    ledger: where every group is.
    newest_version: the newest version that exists.
    stop_reason: why the run ended; None while it goes on.
    versions_alive_max: most versions alive at once, as `versions_alive` counts.
    trainer_wait_s: seconds in which the trainer stood idle, by cause: "data",
      or "straggler" where R1 alone held back a batch that was there.
  """

  def __init__(
    self,
    *,
    schedule: base.Schedule,
    group_size: int,
    prompts_per_batch: int,
    num_steps: int,
  ):
    """Starts at version 0 with no generator.

    Args:
      schedule: the strategy.
      group_size: M, members of a group.
      prompts_per_batch: P, groups that a step consumes.
      num_steps: steps to make before the run ends.
    """
    self._schedule = schedule
    self._prompts_per_batch = prompts_per_batch
    self._num_steps = num_steps
    self._num_groups: int | None = None
    self._generators: dict[int, placement.GeneratorView] = {}
    self._held = {0}
    self._waiting_groups: collections.OrderedDict[int, None] = (
      collections.OrderedDict()
    )
    self._is_training = False
    self._is_stopping: str | None = None
    self._idle_since_s: float | None = None
    self._held_since_s: float | None = None
    self._step_started_s = 0.0
    self._step_s = 0.0
    self.ledger = ledger_lib.Ledger(group_size=group_size)
    self.newest_version = 0
    self.stop_reason: str | None = None
    self.versions_alive_max = 1
    self.trainer_wait_s = {"data": 0.0, "straggler": 0.0}

  @property
  def max_staleness(self) -> int:
    """K, by which the schedule bounds the lag."""
    return self._schedule.max_staleness

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
    if self._idle_since_s is None and not self._is_training:
      self._idle_since_s = now_s
    commands = self._note(event, now_s)
    commands += self._end()
    if self.stop_reason is None:
      commands += self._train(now_s)
      commands += self._seat_members()
      commands += self._load()
      commands += self._start_groups()
      commands += self._release()
    return commands

  def _note(self, event: ev.Event, now_s: float) -> list[ev.Command]:
    """Brings the state up to date; commands that follow at once."""
    match event:
      case ev.GeneratorJoined():
        self._generators[event.generator_id] = placement.GeneratorView(
          generator_id=event.generator_id, num_slots=event.num_slots
        )
      case ev.Loaded():
        generator = self._generators[event.generator_id]
        if generator.loading != event.version:
          raise ValueError(
            f"Generator {event.generator_id} loaded version {event.version}, "
            f"but was asked for {generator.loading}."
          )
        generator.version, generator.loading = event.version, None
      case ev.Finished():
        self.ledger.finish(
          event.group_id,
          event.member,
          version=event.version,
          generator_id=event.generator_id,
        )
        self._generators[event.generator_id].num_live -= 1
        return [ev.Score(group_id=event.group_id, member=event.member)]
      case ev.Scored():
        reason = self.ledger.score(event.group_id, event.member)
        return self._drop(event.group_id, reason)
      case ev.ScoreFailed():
        reason = self.ledger.fail(event.group_id, event.member, event.reason)
        return self._drop(event.group_id, reason)
      case ev.StepDone():
        self._note_step_done(event, now_s)
      case ev.DataExhausted():
        self._note_data_end(event)
      case ev.StopRequested():
        self._is_stopping = event.reason
    return []

  def _note_step_done(self, event: ev.StepDone, now_s: float) -> None:
    if not self._is_training or event.version != self.newest_version + 1:
      raise ValueError(
        f"A step made version {event.version}, but version "
        f"{self.newest_version + 1} was to come"
        f"{'' if self._is_training else ', and no step was under way'}."
      )
    self.ledger.commit()
    self.newest_version = event.version
    self._held.add(event.version)
    self._is_training = False
    self._step_s = now_s - self._step_started_s
    self._idle_since_s = now_s

  def _note_data_end(self, event: ev.DataExhausted) -> None:
    if event.num_groups < self.ledger.next_group_id:
      raise ValueError(
        f"The data ends after {event.num_groups} groups, but "
        f"{self.ledger.next_group_id} have started."
      )
    self._num_groups = event.num_groups

  def _drop(self, group_id: int, reason: str | None) -> list[ev.Command]:
    if reason is None:
      return []
    return [ev.Drop(group_id=group_id, reason=reason)]

  def _num_left_to_start(self) -> int:
    """Groups that may still start before the run or its data ends."""
    wanted = self._num_steps * self._prompts_per_batch
    left = wanted - self.ledger.num_committed()
    if self._num_groups is not None:
      left = min(left, self._num_groups - self.ledger.next_group_id)
    return max(0, left)

  def _view(self) -> base.View:
    return base.View(
      ledger=self.ledger,
      newest_version=self.newest_version,
      is_training=self._is_training,
      prompts_per_batch=self._prompts_per_batch,
      is_draining=self._num_left_to_start() == 0,
    )

  def _end(self) -> list[ev.Command]:
    """Ends the run where it is finished, or where it was asked to end."""
    if self._is_training:
      return []
    if self._is_stopping is not None:
      self.stop_reason = self._is_stopping
      self.ledger.abandon("stopped")
    elif self.newest_version == self._num_steps:
      self.stop_reason = "finished"
    elif self._num_left_to_start() == 0 and not (
      self.ledger.open or self.ledger.ready
    ):
      self.stop_reason = "data_exhausted"
    else:
      return []
    return [ev.Stop(reason=self.stop_reason)]

  def _train(self, now_s: float) -> list[ev.Command]:
    if self._is_training or self._is_stopping is not None:
      return []
    view = self._view()
    group_ids = self._schedule.batch(view)
    if not group_ids:
      is_held = len(self.ledger.ready) >= view.batch_size > 0
      if is_held and self._held_since_s is None:
        self._held_since_s = now_s
      return []
    step = self.newest_version
    self.ledger.take(group_ids, step=step)
    self._check_lags(step)
    self._is_training = True
    idle_since_s = now_s if self._idle_since_s is None else self._idle_since_s
    held_since_s = now_s if self._held_since_s is None else self._held_since_s
    self.trainer_wait_s["straggler"] += now_s - held_since_s
    self.trainer_wait_s["data"] += held_since_s - idle_since_s
    self._idle_since_s = self._held_since_s = None
    self._step_started_s = now_s
    self._schedule.step_started(
      self._view(), waited_s=now_s - idle_since_s, step_s=self._step_s
    )
    return [ev.Train(step=step, group_ids=tuple(group_ids))]

  def _check_lags(self, step: int) -> None:
    """Asserts C3 where it counts: at the moment of training."""
    for group_id, version in self.ledger.in_batch.items():
      if not 0 <= step - version <= self._schedule.max_staleness:
        raise ValueError(
          f"Group {group_id} of version {version} would be trained at step "
          f"{step}: lag {step - version} is outside of 0 … "
          f"{self._schedule.max_staleness}."
        )

  def _seat_members(self) -> list[ev.Command]:
    """Gives slots to members of groups that have started, oldest first."""
    commands: list[ev.Command] = []
    full: set[int] = set()
    for group_id in list(self._waiting_groups):
      group = self.ledger.open[group_id]
      if group.version in full:
        continue
      commands += self._seat(group, self._generators.values())
      if group.waiting:
        full.add(group.version)
    return commands

  def _seat(
    self,
    group: ledger_lib.OpenGroup,
    generators: Iterable[placement.GeneratorView],
  ) -> Iterator[ev.Submit]:
    """Seats what it can of one group."""
    for generator_id, num_members in placement.seats(
      generators,
      version=group.version,
      num_members=len(group.waiting),
      hosts=group.running.values(),
    ):
      members = self.ledger.submit(group.group_id, generator_id, num_members)
      self._generators[generator_id].num_live += num_members
      yield ev.Submit(
        generator_id=generator_id,
        group_id=group.group_id,
        members=members,
        version=group.version,
      )
    if group.waiting:
      self._waiting_groups[group.group_id] = None
    else:
      self._waiting_groups.pop(group.group_id, None)

  def _load(self) -> list[ev.Command]:
    """Gives the newest version to generators that stand idle."""
    commands: list[ev.Command] = []
    for generator_id in placement.generators_to_load(
      self._generators.values(), newest_version=self.newest_version
    ):
      # An idle generator lets go of what it served: nothing will need it again.
      generator = self._generators[generator_id]
      generator.version, generator.loading = None, self.newest_version
      commands.append(
        ev.Load(generator_id=generator_id, version=self.newest_version)
      )
    return commands

  def _start_groups(self) -> list[ev.Command]:
    """Starts new groups, the newest version first, each with a free slot."""
    if self._is_stopping is not None:
      return []
    generators = placement.generators_to_fill(
      self._generators.values(),
      newest_version=self.newest_version,
      oldest_version=self.versions_alive()[0],
    )
    commands: list[ev.Command] = []
    versions = {g.version for g in generators if g.version is not None}
    for version in sorted(versions, reverse=True):
      num_free = sum(g.num_free() for g in generators if g.version == version)
      room = min(
        self._schedule.room(self._view(), version), self._num_left_to_start()
      )
      while room > 0 and num_free > 0:
        submits = list(self._seat(self.ledger.start(version), generators))
        num_free -= sum(len(s.members) for s in submits)
        commands += submits
        room -= 1
    return commands

  def _release(self) -> list[ev.Command]:
    """Frees versions that no request, generator or later Load can need."""
    self.versions_alive_max = max(
      self.versions_alive_max, len(self.versions_alive())
    )
    held = set(self.versions_alive())
    for generator in self._generators.values():
      held.update(
        v for v in (generator.version, generator.loading) if v is not None
      )
    released = sorted(self._held - held)
    self._held -= set(released)
    return [ev.Release(version=version) for version in released]

  def versions_alive(self) -> list[int]:
    """The newest version and those of unfinished groups; oldest first."""
    unfinished = (v for v, n in self.ledger.num_unfinished.items() if n)
    return sorted({self.newest_version, *unfinished})

  def waits(self) -> list[tuple[str, str]]:
    """Says who waits for what, as pairs, for the progress view."""
    pairs = []
    if not self._is_training:
      lacking = self._view().batch_size - len(self.ledger.ready)
      oldest = next(iter(self.ledger.open.values()), None)
      if lacking > 0:
        pairs.append(("trainer", f"{lacking} more groups"))
      elif oldest is not None:
        pairs.append(
          ("trainer", f"group {oldest.group_id} of version {oldest.version}")
        )
    for g in self._generators.values():
      if g.loading is not None:
        pairs.append((f"generator {g.generator_id}", f"version {g.loading}"))
      elif g.num_live == 0:
        pairs.append((f"generator {g.generator_id}", "prompts"))
    return pairs

  def snapshot(self) -> dict[str, Any]:
    """The state as JSON-able data, written beside the report of a stall."""
    ledger = self.ledger
    return {
      "newest_version": self.newest_version,
      "is_training": self._is_training,
      "versions_alive": self.versions_alive(),
      "next_group_id": ledger.next_group_id,
      "num_trained": ledger.num_trained,
      "dropped": ledger.dropped,
      "in_batch": sorted(ledger.in_batch),
      "ready": [list(entry) for entry in ledger.ready],
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
      "generators": [vars(g) for g in self._generators.values()],
    }
