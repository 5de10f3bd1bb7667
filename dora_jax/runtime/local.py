"""The runtime in one process: results become events, commands become orders.

One thread runs this loop and everything the coordinator, the evaluation and the
recorder do; the parts (trainer, generator meshes, rewards) have a thread each.
It serves a single host, and a Pathways controller, which sees every device.
"""

import dataclasses
import json
import pathlib
import queue
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from absl import logging

from dora_jax import interfaces, types
from dora_jax.coordinator import coordinator as coordinator_lib
from dora_jax.coordinator import events as ev
from dora_jax.runtime import (
  evaluation,
  generating,
  part,
  recorder,
  scoring,
  training,
)
from dora_jax.tasks import reward_pool
from dora_jax.weights import store as store_lib

_PROPER_ENDS = ("finished", "data_exhausted")
_EVALUATION = "evaluation"
_ROLLOUT = "rollout"
_REFRESH_S = 0.5
# How long a part may take to end after it was told to.
_JOIN_S = 20.0


class PartFailed(RuntimeError):
  """A part of the run ended by an exception, which is the cause of this one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
  """The threads of a run.

  Attributes:
    trainer: makes steps.
    rewards: scores completions.
    generators: generator_id -> the part that drives its mesh.
    names: generator_id -> its name, by which it holds versions.
    mesh_ids: generator_id -> its mesh.
    num_slots: generator_id -> its slots, for those that the coordinator uses.
    evaluation_id: the generator that the evaluation uses.
  """

  trainer: training.TrainerPart
  rewards: scoring.RewardPart
  generators: Mapping[int, generating.GeneratorPart]
  names: Mapping[int, str]
  mesh_ids: Mapping[int, int]
  num_slots: Mapping[int, int]
  evaluation_id: int

  def all(self) -> list[part.Part]:
    """Each part once."""
    return [
      self.trainer,
      self.rewards,
      *dict.fromkeys(self.generators.values()),
    ]


@dataclasses.dataclass(kw_only=True)
class _GroupData:
  """What the coordinator knows only by id."""

  prompt: types.Prompt
  trajectories: dict[int, types.Trajectory] = dataclasses.field(
    default_factory=dict
  )
  rewards: dict[int, float] = dataclasses.field(default_factory=dict)

  def group(self, group_id: int) -> types.Group:
    """The finished group, in order of its members."""
    members = sorted(self.trajectories)
    return types.Group(
      group_id=group_id,
      prompt=self.prompt,
      trajectories=tuple(self.trajectories[m] for m in members),
      rewards=np.array([self.rewards[m] for m in members], np.float32),
    )


class LocalRuntime:
  """Carries out what the coordinator commands, until it says Stop."""

  def __init__(
    self,
    *,
    coordinator: coordinator_lib.Coordinator,
    task: interfaces.Task,
    tokenizer: interfaces.Tokenizer,
    parts: Parts,
    inbox: queue.SimpleQueue[Any],
    store: store_lib.WeightStore,
    evaluator: evaluation.Evaluation,
    evaluate_every_steps: int,
    record: recorder.Recorder,
    workdir: pathlib.Path,
    temperature: float,
    max_new_tokens: int,
    stall_s: float,
  ):
    """Wires; starts nothing.

    Args:
      coordinator: decides.
      task: prompts by group id.
      tokenizer: decodes completions for the rewards.
      parts: not yet started.
      inbox: where the parts post.
      store: of versions; version 0 is published in it.
      evaluator: of held-out prompts.
      evaluate_every_steps: 0 evaluates only before and after.
      record: what the run leaves behind.
      workdir: of the run.
      temperature: of sampling in training.
      max_new_tokens: of a completion.
      stall_s: a silence beyond it is reported.
    """
    self._coordinator = coordinator
    self._task = task
    self._tokenizer = tokenizer
    self._parts = parts
    self._inbox = inbox
    self._store = store
    self._evaluator = evaluator
    self._evaluate_every_steps = evaluate_every_steps
    self._record = record
    self._workdir = workdir
    self._temperature = temperature
    self._max_new_tokens = max_new_tokens
    self._stall_s = stall_s
    self._groups: dict[int, _GroupData] = {}
    self._heard_s = time.monotonic()

  def run(self) -> str:
    """Runs to the end; returns why it ended.

    Raises:
      PartFailed: a part has failed; its exception is the cause.
    """
    parts = self._parts.all()
    for each in parts:
      each.start()
    try:
      with self._interruptible():
        self._record.start_clock()
        self._evaluator.request(self._coordinator.newest_version, must_run=True)
        self._join_generators()
        while not self._is_over():
          message = self._next_message()
          if message is not None:
            self._hear(message)
          self._record.refresh()
    finally:
      self._end_parts()
    assert self._coordinator.stop_reason is not None
    return self._coordinator.stop_reason

  def _is_over(self) -> bool:
    """An early end does not wait for an evaluation; a proper one does."""
    reason = self._coordinator.stop_reason
    if reason in _PROPER_ENDS:
      return self._evaluator.is_idle()
    return reason is not None

  def _join_generators(self) -> None:
    if self._task.num_groups is not None:
      self._feed(ev.DataExhausted(num_groups=self._task.num_groups))
    for generator_id, num_slots in self._parts.num_slots.items():
      self._feed(
        ev.GeneratorJoined(generator_id=generator_id, num_slots=num_slots)
      )

  def _next_message(self) -> Any | None:
    try:
      message = self._inbox.get(timeout=_REFRESH_S)
    except queue.Empty:
      if time.monotonic() - self._heard_s > self._stall_s:
        self._report_stall()
        self._heard_s = time.monotonic()
      return None
    self._heard_s = time.monotonic()
    return message

  def _hear(self, message: Any) -> None:
    match message:
      case part.Failure():
        raise PartFailed(
          f"{message.part} failed: {type(message.error).__name__}: "
          f"{message.error}"
        ) from message.error
      case generating.Sampled():
        self._hear_sampled(message)
      case generating.Served():
        if message.generator_id == self._parts.evaluation_id:
          self._evaluator.serve()
        else:
          self._feed(
            ev.Loaded(
              generator_id=message.generator_id, version=message.version
            )
          )
      case scoring.Judged():
        for result in message.results:
          self._hear_score(result)
      case training.Stepped():
        self._hear_step(message)
      case ev.StopRequested():
        self._record.note(f"stopping: {message.reason}")
        self._feed(message)
      case _:
        raise TypeError(f"Nobody sends {message!r}.")

  def _hear_sampled(self, message: generating.Sampled) -> None:
    for trajectory in message.trajectories:
      if message.generator_id == self._parts.evaluation_id:
        prompt = self._evaluator.prompt(trajectory)
        self._send_score(_EVALUATION, prompt, trajectory)
      elif trajectory.group_id in self._groups:
        data = self._groups[trajectory.group_id]
        data.trajectories[trajectory.member] = trajectory
        self._record.trajectory(trajectory)
        self._feed(
          ev.Finished(
            generator_id=message.generator_id,
            group_id=trajectory.group_id,
            member=trajectory.member,
            version=trajectory.version,
          )
        )

  def _send_score(
    self, purpose: str, prompt: types.Prompt, trajectory: types.Trajectory
  ) -> None:
    completion = self._tokenizer.decode(trajectory.completion.tolist())
    self._parts.rewards.send(
      scoring.ScoreOrder(
        job=(purpose, trajectory.group_id, trajectory.member),
        prompt=prompt,
        completion=completion,
      )
    )

  def _hear_score(self, result: reward_pool.ScoreResult) -> None:
    assert isinstance(result.job, tuple)
    purpose, group_id, member = result.job
    if purpose == _EVALUATION:
      done = self._evaluator.score(result)
      if done is not None:
        self._record.evaluation(done)
    elif group_id not in self._groups:
      return  # The run has stopped early, and its groups are forgotten.
    elif result.reward is None:
      assert result.error is not None
      self._record.score_error(group_id, member, result.error)
      is_late = result.error.startswith("timed out")
      reason = "reward_timed_out" if is_late else "reward_failed"
      self._feed(
        ev.ScoreFailed(group_id=group_id, member=member, reason=reason)
      )
    else:
      self._groups[group_id].rewards[member] = result.reward
      self._feed(ev.Scored(group_id=group_id, member=member))

  def _hear_step(self, message: training.Stepped) -> None:
    every = self._evaluate_every_steps
    if every and message.version % every == 0:
      self._evaluator.request(message.version, must_run=False)
    self._feed(ev.StepDone(version=message.version))
    self._record.step(message.version, message.metrics)

  def _feed(self, event: ev.Event) -> None:
    for command in self._coordinator.handle(event, time.monotonic()):
      self._carry_out(command)

  def _carry_out(self, command: ev.Command) -> None:
    match command:
      case ev.Load():
        self._store.reserve(
          command.version,
          holder=self._parts.names[command.generator_id],
          mesh_id=self._parts.mesh_ids[command.generator_id],
        )
        self._parts.generators[command.generator_id].send(
          generating.LoadOrder(
            generator_id=command.generator_id, version=command.version
          )
        )
      case ev.Submit():
        self._submit(command)
      case ev.Score():
        data = self._groups[command.group_id]
        self._send_score(
          _ROLLOUT, data.prompt, data.trajectories[command.member]
        )
      case ev.Train():
        groups = [self._groups.pop(g).group(g) for g in command.group_ids]
        self._record.batch(groups, step=command.step)
        self._parts.trainer.send(groups)
      case ev.Drop():
        del self._groups[command.group_id]
      case ev.Release():
        self._store.release(command.version, holder="coordinator")
      case ev.Stop():
        self._stop(command)

  def _submit(self, command: ev.Submit) -> None:
    if command.group_id not in self._groups:
      prompt = self._task.prompt(command.group_id)
      self._groups[command.group_id] = _GroupData(prompt=prompt)
    prompt = self._groups[command.group_id].prompt
    self._parts.generators[command.generator_id].send(
      generating.SubmitOrder(
        generator_id=command.generator_id,
        requests=[
          types.Request(
            group_id=command.group_id,
            member=member,
            version=command.version,
            prompt=prompt.tokens,
            max_new_tokens=self._max_new_tokens,
            temperature=self._temperature,
          )
          for member in command.members
        ],
      )
    )

  def _stop(self, command: ev.Stop) -> None:
    self._groups.clear()
    if command.reason in _PROPER_ENDS:
      self._evaluator.request(self._coordinator.newest_version, must_run=True)

  def _report_stall(self) -> None:
    """Says who waits for what, and writes the coordinator's state down."""
    path = self._workdir / "stall.json"
    path.write_text(json.dumps(self._coordinator.snapshot(), indent=2))
    now_s = time.monotonic()
    lines = [
      f"{who} waits for {what}" for who, what in self._coordinator.waits()
    ]
    lines += [
      f"{each.part} is {each.doing} for {now_s - each.since_s:.0f} s"
      for each in self._parts.all()
    ]
    logging.error(
      "Nothing has happened for %.0f s (config.runtime.stall_s): %s. The "
      "coordinator's state is in stall.json of the workdir.",
      self._stall_s,
      "; ".join(lines),
    )

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
