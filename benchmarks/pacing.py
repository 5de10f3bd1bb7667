"""Lets each device of a run take the time that an accelerator would.

On a CPU with fewer cores than devices, trainer and generators share the cores:
what one does not use another takes, so a generator that idles costs nothing and
a schedule that keeps all of them busy gains little. A paced run does all of its
real work, and then each device sleeps until its time is up, on its own. The
times are those of memory-bound decoding: a decode step costs the same however
many slots are live.
"""

import dataclasses
import time
from typing import Any

from dora_jax.runtime import build


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
  """What an operation takes at least.

  Attributes:
    decode_step_s: one decode step of one generator.
    prefill_token_s: one prompt token, or one token prefilled again.
    train_step_s: one training step.
  """

  decode_step_s: float
  prefill_token_s: float
  train_step_s: float


class _PacedWorker:
  """A mesh worker whose steps take their time; else the one it wraps."""

  def __init__(self, worker: Any, pace: Pace):
    self._worker = worker
    self._pace = pace
    self._charged_s = 0.0

  def __getattr__(self, name: str) -> Any:
    return getattr(self._worker, name)

  def step(self) -> Any:
    """Steps, then sleeps until the time of what was done is over.

    That includes what was prefilled again between two steps.
    """
    start_s = time.perf_counter()
    finished = self._worker.step()
    cost_s = self._cost_s()
    _sleep_until(start_s + cost_s - self._charged_s)
    self._charged_s = cost_s
    return finished

  def _cost_s(self) -> float:
    """Of all that the mesh's lanes have done since they were made."""
    steps = tokens = 0
    for lane in self._worker.lanes:
      steps += lane.counters.total_slot_steps // lane.num_slots
      tokens += lane.counters.prefilled_tokens
      tokens += lane.counters.reprefilled_tokens
    return (
      steps * self._pace.decode_step_s + tokens * self._pace.prefill_token_s
    )


def apply(made: build.Run, pace: Pace) -> None:
  """Makes a run that has not started keep this pace."""
  for generator in made.generator_parts:
    worker: Any = _PacedWorker(generator.worker, pace)
    generator.worker = worker
  trainer: Any = made.trainer
  train = trainer.train

  def paced_train(groups: Any) -> Any:
    start_s = time.perf_counter()
    metrics = train(groups)
    _sleep_until(start_s + pace.train_step_s)
    return metrics

  trainer.train = paced_train


def _sleep_until(end_s: float) -> None:
  left_s = end_s - time.perf_counter()
  if left_s > 0:
    time.sleep(left_s)
