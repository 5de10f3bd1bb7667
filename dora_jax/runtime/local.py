"""The runtime in one process: results become events, commands become orders.

One thread runs this loop and everything the coordinator, the evaluation and the
recorder do; the parts (trainer, generator meshes, rewards) have a thread each.
It serves a single host, and a Pathways controller, which sees every device.
"""

import queue
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from absl import logging

from dora_jax import interfaces
from dora_jax.coordinator import coordinator as coordinator_lib
from dora_jax.coordinator import events as ev
from dora_jax.runtime import (
  evaluation,
  executing,
  faults,
  orders,
  part,
  record,
  recorder,
  saving,
  scoring,
  training,
)
from dora_jax.runtime import replicas as replicas_lib
from dora_jax.runtime import watchdog as watchdog_lib
from dora_jax.tasks import reward_pool

_PROPER_ENDS = ("finished", "data_exhausted")
_REFRESH_S = 0.5
# How long a part may take to end after it was told to.
_JOIN_S = 20.0


class PartFailed(RuntimeError):
  """The run cannot go on: a part failed, by the exception that is the cause."""


class LocalRuntime:
  """Carries out what the coordinator commands, until it says Stop."""

  def __init__(
    self,
    *,
    coordinator: coordinator_lib.Coordinator,
    task: interfaces.Task,
    parts: executing.Parts,
    executor: executing.Executor,
    inbox: queue.SimpleQueue[Any],
    evaluator: evaluation.Evaluation,
    evaluate_every_steps: int,
    results: recorder.Recorder,
    saver: saving.Saver,
    events: record.EventWriter,
    gate: record.ReplayGate | None,
    watchdog: watchdog_lib.Watchdog,
    losses: faults.Losses,
    replicas: replicas_lib.Replicas,
    solved_reward: float,
    tick_s: float,
  ):
    """Wires; starts nothing.

    Args:
      coordinator: decides.
      task: says how many groups there are.
      parts: not yet started.
      executor: carries out commands.
      inbox: where the parts post.
      evaluator: of held-out prompts.
      evaluate_every_steps: 0 evaluates only before and after.
      results: what the run leaves behind.
      saver: of checkpoints.
      events: the record of what the coordinator hears.
      gate: of the record that this run follows; None where it follows none.
      watchdog: notices stalls.
      losses: lets go of generators that have failed.
      replicas: notices slow ones.
      solved_reward: least reward of a solved prompt.
      tick_s: seconds between two Ticks; 0 sends none.
    """
    self._coordinator = coordinator
    self._task = task
    self._parts = parts
    self._executor = executor
    self._inbox = inbox
    self._evaluator = evaluator
    self._evaluate_every_steps = evaluate_every_steps
    self._results = results
    self._saver = saver
    self._events = events
    self._gate = gate
    self._watchdog = watchdog
    self._losses = losses
    self._replicas = replicas
    self._solved_reward = solved_reward
    self._tick_s = tick_s
    self._ticked_s = time.monotonic()
    self._last_error: BaseException | None = None
    # Of the step that the coordinator has not heard of yet.
    self._step_metrics: Mapping[str, float] = {}
    # The coordinator's clock goes on where a run that this one resumes was.
    self._clock_start_s = time.monotonic()
    # What a run that this one resumes had under way: to be asked for anew.
    self._resumed: ev.Resumed | None = None
    self._again: list[ev.Command] | None = None
    # Generators that are given again what the coordinator knows they serve.
    self._silent: set[int] = set()

  def resume(self) -> None:
    """Goes on from the checkpoint that was found; call it before `run`.

    Raises:
      ValueError: the run follows a record, and cannot go on with it from here.
    """
    versions = self._saver.resume()
    assert self._saver.found is not None
    self._clock_start_s -= self._saver.found.extras["now_s"]
    if self._gate is None:
      self._resumed = ev.Resumed(versions=tuple(versions))
    else:
      # The record knows of no resume: all is put back to where it was.
      self._again = self._coordinator.under_way()

  def save(self) -> None:
    """Starts to write a checkpoint; call it while no part is running.

    Raises:
      checkpoint.SaveFailed: there is no room for it.
    """
    self._parts.trainer.save(self._saver.order(self._now_s()))

  def save_last_good(self) -> str:
    """After a failure of `run`: saves what is whole; says what was saved."""
    return faults.save_last_good(self._saver, self._now_s(), self._results.step)

  def run(self) -> str:
    """Runs to the end; returns why it ended.

    Raises:
      PartFailed: a part has failed without which nothing goes on; its exception
        is the cause.
      watchdog.GaveUp: nothing has gone on for long.
    """
    parts = self._parts.all()
    for each in parts:
      each.start()
    try:
      with self._interruptible():
        self._results.start_clock()
        self._begin()
        self._watchdog.hear()
        while not self._is_over():
          message = self._next_message()
          if message is not None:
            self._hear(message)
          self._watch()
    finally:
      self._end_parts()
    reason = self._coordinator.stop_reason
    assert reason is not None
    if reason == "generators_lost":
      raise PartFailed(
        f"No generator is left: {'; '.join(self._losses.causes.values())}"
      ) from self._last_error
    return reason

  def _is_over(self) -> bool:
    """An early end does not wait for an evaluation; a proper one does."""
    reason = self._coordinator.stop_reason
    if reason in _PROPER_ENDS:
      return self._evaluator.is_idle()
    return reason is not None

  def _begin(self) -> None:
    if self._again is not None:
      self._silent = {
        view.generator_id
        for view in self._coordinator.fleet
        if view.version is not None and view.loading is None
      }
      self._carry_out(self._again)
      return
    if self._resumed is not None:
      self._feed(self._resumed)
    else:
      version = self._coordinator.newest_version
      self._evaluator.request(version, must_run=True)
    if self._task.num_groups is not None:
      self._feed(ev.DataExhausted(num_groups=self._task.num_groups))
    for event in self._parts.joined():
      self._feed(event)

  def _next_message(self) -> Any | None:
    timeout_s = _REFRESH_S
    if self._tick_s:
      timeout_s = min(timeout_s, self._tick_s)
      if time.monotonic() - self._ticked_s >= self._tick_s:
        self._ticked_s = time.monotonic()
        self._feed(ev.Tick())
    try:
      message = self._inbox.get(timeout=timeout_s)
    except queue.Empty:
      return None
    self._watchdog.hear()
    return message

  def _watch(self) -> None:
    """Shows where the run stands, and what is wrong with it."""
    further = []
    if self._gate is not None:
      further = [f"the record goes on with {self._gate.waiting_for()}"]
    if self._watchdog.look(further):
      self._events.flush()
    self._replicas.look(time.monotonic())
    self._results.refresh()

  def _hear(self, message: Any) -> None:
    match message:
      case part.Failure():
        self._hear_failure(message)
      case orders.Sampled():
        self._hear_sampled(message)
      case orders.Served():
        self._hear_served(message)
      case ev.Progress():
        if message.generator_id != self._parts.evaluation_id:
          self._feed(message)
      case orders.Extracted():
        moved = self._executor.pass_on(message)
        if moved is not None:
          self._feed(moved)
      case orders.Restored() | orders.RestoreFailed():
        self._feed(self._executor.end_move(message))
      case orders.Cancelled():
        self._feed(
          ev.Cancelled(
            generator_id=message.generator_id, cancelled=message.cancelled
          )
        )
      case scoring.Judged():
        for result in message.results:
          self._hear_score(result)
      case training.Stepped():
        self._hear_step(message)
      case training.Skipped():
        self._feed(ev.StepSkipped(step=message.step, reason=message.reason))
      case ev.StopRequested():
        self._results.note(f"stopping: {message.reason}")
        self._feed(message)
      case _:
        raise TypeError(f"Nobody sends {message!r}.")

  def _hear_failure(self, message: part.Failure) -> None:
    """Goes on without a generator that has failed, if that can be."""
    events = None
    if self._gate is None:  # A record needs every generator.
      events = self._losses.take(
        message, newest_version=self._coordinator.newest_version
      )
    if events is None:
      raise PartFailed(faults.describe(message)) from message.error
    self._last_error = message.error
    if self._losses.is_evaluation_lost:
      self._results.end_evaluations()
    for event in events:
      self._feed(event)
    for moved in self._executor.end_lost_moves():
      self._feed(moved)

  def _hear_sampled(self, message: orders.Sampled) -> None:
    for trajectory in message.trajectories:
      if message.generator_id == self._parts.evaluation_id:
        prompt = self._evaluator.prompt(trajectory)
        self._executor.send_score(executing.EVALUATION, prompt, trajectory)
      else:
        self._executor.keep_trajectory(trajectory)
        self._results.trajectory(trajectory)
        self._feed(
          ev.Finished(
            generator_id=message.generator_id,
            group_id=trajectory.group_id,
            member=trajectory.member,
            version=trajectory.version,
            num_tokens=len(trajectory.completion),
          )
        )

  def _hear_served(self, message: orders.Served) -> None:
    if message.generator_id == self._parts.evaluation_id:
      self._evaluator.serve()
    elif message.generator_id in self._silent:
      self._silent.remove(message.generator_id)
    else:
      self._feed(
        ev.Loaded(
          generator_id=message.generator_id,
          version=message.version,
          num_reprefilled=message.num_reprefilled,
        )
      )

  def _hear_score(self, result: reward_pool.ScoreResult) -> None:
    assert isinstance(result.job, tuple)
    purpose, group_id, member = result.job
    if purpose == executing.EVALUATION:
      done = self._evaluator.score(result)
      if done is not None:
        self._results.evaluation(done)
    elif result.reward is None:
      assert result.error is not None
      self._results.score_error(group_id, member, result.error)
      is_late = result.error.startswith("timed out")
      reason = "reward_timed_out" if is_late else "reward_failed"
      self._feed(
        ev.ScoreFailed(group_id=group_id, member=member, reason=reason)
      )
    else:
      self._executor.keep_reward(
        group_id, member, result.reward, result.components
      )
      self._feed(
        ev.Scored(
          group_id=group_id,
          member=member,
          is_solved=result.reward >= self._solved_reward,
        )
      )

  def _hear_step(self, message: training.Stepped) -> None:
    every = self._evaluate_every_steps
    if every and message.version % every == 0:
      self._evaluator.request(message.version, must_run=False)
    self._step_metrics = message.metrics
    self._feed(ev.StepDone(version=message.version))

  def _feed(self, event: ev.Event) -> None:
    """Lets the coordinator hear what has happened, or what is recorded."""
    if self._gate is None:
      self._decide(event, self._now_s())
      return
    self._gate.offer(event)
    while self._coordinator.stop_reason is None:
      recorded = self._gate.next()
      if not recorded:
        return
      for past_event, past_s in recorded:
        self._decide(past_event, past_s)

  def _decide(self, event: ev.Event, now_s: float) -> None:
    # A run that was stopped is so until it has heard that it goes on.
    if self._coordinator.stop_reason is None or isinstance(event, ev.Resumed):
      self._events.write(event, now_s)
    commands = self._coordinator.handle(event, now_s)
    if isinstance(event, ev.StepDone):
      self._end_step(event.version, now_s)
    self._carry_out(commands)

  def _carry_out(self, commands: Sequence[ev.Command]) -> None:
    # What is let go goes first: a generator that unloads the version meanwhile
    # would find itself its last holder, and keep a copy for nobody.
    for command in sorted(
      commands, key=lambda c: not isinstance(c, ev.Release)
    ):
      batch = self._executor.carry_out(command)
      if isinstance(command, ev.Train) and batch is not None:
        self._results.batch(batch, step=command.step)
      elif isinstance(command, ev.Stop) and command.reason in _PROPER_ENDS:
        self._evaluator.request(self._coordinator.newest_version, must_run=True)

  def _end_step(self, version: int, now_s: float) -> None:
    """Writes down what a step measured, and saves the version if it is due.

    The coordinator has heard of the step, and nothing that follows has begun.
    """
    self._results.step(version, self._step_metrics)
    if self._saver.is_due(version):
      self._parts.trainer.send(self._saver.order(now_s))

  def _now_s(self) -> float:
    """The coordinator's clock."""
    return time.monotonic() - self._clock_start_s

  def _end_parts(self) -> None:
    """Ends every thread; names those that do not end in time."""
    parts = [each for each in self._parts.all() if each.is_alive()]
    for each in parts:
      each.send(None)
    deadline_s = time.monotonic() + _JOIN_S
    for each in parts:
      each.join(max(0.0, deadline_s - time.monotonic()))
      if each.is_alive():
        logging.error(
          "%s has not ended within %.0f s: it is %s.",
          each.part,
          _JOIN_S,
          each.doing,
        )

  @contextmanager
  def _interruptible(self) -> Iterator[None]:
    """Turns the first Ctrl-C or SIGTERM into an orderly end.

    The second one is Python's own, which stops at once.
    """

    def ask(number: int, _: Any) -> None:
      name = signal.Signals(number)
      self._inbox.put(ev.StopRequested(reason=name.name.lower()))
      signal.signal(name, before[name])

    before = {
      number: signal.signal(number, ask)
      for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
      yield
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)
