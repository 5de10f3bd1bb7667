"""When the trainer makes a step, and what it waits for meanwhile."""

from collections.abc import Mapping
from typing import Any

from dora_jax.coordinator import events as ev
from dora_jax.coordinator import reuse as reuse_lib
from dora_jax.coordinator.schedules import base

# Steps in a row that came to nothing, after which going on is no use.
MOST_SKIPPED = 10


class Stepping:
  """Starts and ends steps as the schedule has it.

  Attributes:
    wait_s: seconds in which the trainer stood idle, by cause: "data", or
      "straggler" where R1 alone held back a batch that was there.
    reuse: what steps take again.
    num_skipped_in_row: steps that came to nothing since the last that did not.
  """

  def __init__(
    self,
    schedule: base.Schedule,
    view: base.View,
    reuse: reuse_lib.Settings,
  ):
    """Starts before the first step."""
    self.reuse = reuse_lib.Reuse(reuse, max_staleness=schedule.max_staleness)
    self._schedule = schedule
    self._view = view
    self._idle_since_s: float | None = None
    self._held_since_s: float | None = None
    self._step_started_s = 0.0
    self._step_s = 0.0
    self.num_skipped_in_row = 0
    # Of the step that was started last.
    self._reused_ids: tuple[int, ...] = ()
    self._kept_ids: tuple[int, ...] = ()
    self.wait_s = {"data": 0.0, "straggler": 0.0}

  def state(self) -> dict[str, Any]:
    """All of it, JSON-able."""
    return {
      "idle_since_s": self._idle_since_s,
      "held_since_s": self._held_since_s,
      "step_started_s": self._step_started_s,
      "step_s": self._step_s,
      "num_skipped_in_row": self.num_skipped_in_row,
      "wait_s": dict(self.wait_s),
      "reused_ids": list(self._reused_ids),
      "kept_ids": list(self._kept_ids),
      "reuse": self.reuse.state(),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from a state."""
    self._idle_since_s = state["idle_since_s"]
    self._held_since_s = state["held_since_s"]
    self._step_started_s = state["step_started_s"]
    self._step_s = state["step_s"]
    self.num_skipped_in_row = state["num_skipped_in_row"]
    self.wait_s = dict(state["wait_s"])
    self._reused_ids = tuple(state["reused_ids"])
    self._kept_ids = tuple(state["kept_ids"])
    self.reuse.restore(state["reuse"])

  def resume(self) -> list[ev.Command]:
    """Asks again for the step that was under way, if one was."""
    view = self._view
    if not view.is_training:
      return []
    return [self._train()]

  def note_time(self, now_s: float) -> None:
    """Notes when the trainer's first wait began."""
    if self._idle_since_s is None and not self._view.is_training:
      self._idle_since_s = now_s

  def start(self, now_s: float) -> ev.Train | None:
    """Starts the next step, if its batch is there and may be trained."""
    view, ledger = self._view, self._view.ledger
    group_ids = self._schedule.batch(view)
    if not group_ids:
      if self.is_held() and self._held_since_s is None:
        self._held_since_s = now_s
      return None
    step = view.newest_version
    ledger.take(group_ids, step=step)
    self._check_lags(step)
    view.is_training = True
    idle_since_s = now_s if self._idle_since_s is None else self._idle_since_s
    held_since_s = now_s if self._held_since_s is None else self._held_since_s
    self.wait_s["straggler"] += now_s - held_since_s
    self.wait_s["data"] += held_since_s - idle_since_s
    self._idle_since_s = self._held_since_s = None
    self._step_started_s = now_s
    self._schedule.step_started(
      view, lacked_s=held_since_s - idle_since_s, step_s=self._step_s
    )
    self._reused_ids = self.reuse.take(step)
    self.reuse.remember(ledger.in_batch)
    self._kept_ids = self.reuse.kept(step)
    return self._train()

  def _train(self) -> ev.Train:
    """The step that is under way."""
    return ev.Train(
      step=self._view.newest_version,
      group_ids=tuple(self._view.ledger.in_batch),
      reused_ids=self._reused_ids,
      kept_ids=self._kept_ids,
    )

  def is_held(self) -> bool:
    """Whether the trainer waits although there are groups for a batch."""
    view = self._view
    is_idle = not view.is_training
    return is_idle and len(view.ledger.ready) >= view.batch_size > 0

  def end(self, event: ev.StepDone, now_s: float) -> None:
    """Notes that a step is done.

    Raises:
      ValueError: it was not under way, or made another version.
    """
    view = self._view
    if not view.is_training or event.version != view.newest_version + 1:
      raise ValueError(
        f"A step made version {event.version}, but version "
        f"{view.newest_version + 1} was to come"
        f"{'' if view.is_training else ', and no step was under way'}."
      )
    view.ledger.commit()
    view.newest_version = event.version
    view.is_training = False
    self.num_skipped_in_row = 0
    self._step_s = now_s - self._step_started_s
    self._idle_since_s = now_s

  def skip(self, event: ev.StepSkipped, now_s: float) -> None:
    """Notes that the step under way came to nothing, and drops its groups.

    Raises:
      ValueError: it is not under way.
    """
    view = self._view
    if not view.is_training or event.step != view.newest_version:
      raise ValueError(
        f"Step {event.step} was skipped, but "
        + (
          f"step {view.newest_version} is under way."
          if view.is_training
          else "no step is under way."
        )
      )
    self.reuse.withdraw(event.step, view.ledger.in_batch, self._reused_ids)
    view.ledger.reject(event.reason, step=event.step)
    view.is_training = False
    self.num_skipped_in_row += 1
    self._idle_since_s = now_s

  def waits(self) -> list[tuple[str, str]]:
    """What the trainer waits for, in words."""
    view = self._view
    if view.is_training:
      return []
    lacking = view.batch_size - len(view.ledger.ready)
    if lacking > 0:
      return [("trainer", f"{lacking} more groups")]
    oldest = min(
      view.ledger.open.values(), key=lambda g: g.version, default=None
    )
    if oldest is None:
      return []
    return [("trainer", f"group {oldest.group_id} of version {oldest.version}")]

  def _check_lags(self, step: int) -> None:
    """Asserts C3 where it counts: at the moment of training."""
    for group_id, version in self._view.ledger.in_batch.items():
      if not 0 <= step - version <= self._schedule.max_staleness:
        raise ValueError(
          f"Group {group_id} of version {version} would be trained at step "
          f"{step}: lag {step - version} is outside of 0 … "
          f"{self._schedule.max_staleness}."
        )
