"""The trainer's thread: steps, publishes, saves."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import logging

from dora_jax import checkpoint, trace, types
from dora_jax.runtime import part, publishing
from dora_jax.trainer import train_state, train_step
from dora_jax.weights import store as store_lib

# Of a gradient so small that Adam's eps, 1e-8 for each weight, outweighs it.
_FAINT_NORM = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stepped:
  """The trainer has made and published a version."""

  version: int
  metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skipped:
  """A step has changed nothing; see interfaces.Trainer.train."""

  step: int
  reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveOrder:
  """Save the trainer's version with what belongs to it.

  Attributes:
    version: that the trainer is at when the order's turn comes.
    extras: JSON-able.
    trees: further arrays, by name.
  """

  version: int
  extras: Mapping[str, Any]
  trees: Mapping[str, Any]


class TrainerPart(part.Part):
  """Trains on what it is sent, publishes, saves.

  Attributes:
    saved: the version that was saved last, here or by the run that this one
      resumes.
    busy_s: seconds in which it made steps and published.
    save_s: seconds that the last save took of its time, since the last step.
    num_failed_saves: checkpoints that could not be written.
    measured: by the last step that made a version, of those of this process;
      without what publishing takes, until it is published.
  """

  def __init__(
    self,
    *,
    post: part.Post,
    trainer: train_step.Trainer,
    publisher: publishing.Publisher,
    checkpoints: checkpoint.Checkpoints,
    publishes_rounded: bool,
    timeline: trace.Trace,
  ):
    """Wires.

    Args:
      post: reaches the runtime.
      trainer: makes steps.
      publisher: gives each version to generators.
      checkpoints: where versions are saved.
      publishes_rounded: whether the store casts to fewer digits than the
        trainer's.
      timeline: of the run.
    """
    super().__init__(name="trainer", post=post)
    self._trainer = trainer
    self._publisher = publisher
    self._checkpoints = checkpoints
    self._publishes_rounded = publishes_rounded
    self._num_unchanged = 0
    self._trace = timeline
    self._track = timeline.track("trainer", "trainer")
    self.saved: int | None = None
    # The state from which a step under way set out.
    self._underway: train_state.TrainState | None = None
    self.busy_s = self.save_s = 0.0
    self.num_failed_saves = 0
    self.measured: dict[str, float] = {}

  def publish(self) -> store_lib.Publication:
    """Makes the trainer's version available to generators."""
    return self._publisher.publish()

  def save(self, order: SaveOrder) -> None:
    """Starts to write a checkpoint, unless there is one of this version.

    Raises:
      checkpoint.SaveFailed: there is no room for it.
    """
    version = self._trainer.version
    if order.version != version:
      raise ValueError(
        f"Version {order.version} is to be saved, but the trainer is at "
        f"{version}."
      )
    if self.saved == version:
      return
    start_s = time.perf_counter()
    self.begin(f"saving version {version}")
    self._end_save()
    recalled = self._trainer.recalled()
    self._checkpoints.save(
      version,
      self._trainer.state(),
      {**order.extras, "trainer": self._trainer.memory()},
      **order.trees,
      **({"recalled": recalled} if recalled else {}),
    )
    self.saved = version
    self.save_s = time.perf_counter() - start_s
    self._trace.span(
      self._track, f"save v{version}", start_s, time.perf_counter()
    )

  def usable_version(self) -> int | None:
    """The version whose train state is there, whole; None in a broken step.

    A step gives the arrays that it sets out from away. For when it has ended.
    """
    if self.is_alive():
      return None
    leaves = jax.tree.leaves(self._trainer.state())
    is_whole = not any(leaf.is_deleted() for leaf in leaves)
    is_between_steps = self._underway is None or (
      list(map(id, leaves)) == list(map(id, jax.tree.leaves(self._underway)))
    )
    if not (is_whole and is_between_steps):
      return None
    return self._trainer.version

  def _end_save(self) -> None:
    """Waits for the save before; a run goes on without it."""
    try:
      self._checkpoints.wait()
    except checkpoint.SaveFailed as error:
      self._note_failed_save(error)

  def _note_failed_save(self, error: checkpoint.SaveFailed) -> None:
    self.num_failed_saves += 1
    logging.error("The run goes on, but: %s", error)

  def work(self) -> None:
    """Makes a step of each list of groups that comes, saves when told to."""
    while True:
      self.begin("waiting for a batch")
      for order in self.take(block=True):
        if order is None:
          return
        if isinstance(order, SaveOrder):
          self._save_on_the_way(order)
        else:
          self._step(order)

  def _save_on_the_way(self, order: SaveOrder) -> None:
    """Saves; without it, what was saved before stands, and the run goes on."""
    try:
      self.save(order)
    except checkpoint.SaveFailed as error:
      self._note_failed_save(error)

  def _step(self, groups: Sequence[types.Group]) -> None:
    step = self._trainer.version
    self.begin(f"step {step}")
    start_s = time.perf_counter()
    self._underway = self._trainer.state()
    metrics = dict(self._trainer.train(groups))
    self._underway = None
    if self._trainer.skipped is not None:
      self._skip(step, self._trainer.skipped, metrics, start_s)
      return
    trained_s = time.perf_counter()
    metrics["train/step_s"] = trained_s - start_s
    self.measured = metrics
    self.begin(f"publishing version {step + 1}")
    publication = self.publish()
    self._check_changed(publication, metrics)
    end_s = time.perf_counter()
    self._trace.span(self._track, f"step {step}", start_s, trained_s)
    metrics |= {
      "weights/publish_s": end_s - trained_s,
      "weights/publish_bytes": publication.num_bytes,
      "weights/arrays_changed": publication.num_changed,
      "weights/unchanged": self._num_unchanged,
      "checkpoint/save_s": self.save_s,
      "checkpoint/failed": self.num_failed_saves,
    }
    self.save_s = 0.0
    self.busy_s += time.perf_counter() - start_s
    self._post(Stepped(version=step + 1, metrics=metrics))

  def _skip(
    self,
    step: int,
    reason: str,
    metrics: Mapping[str, float],
    start_s: float,
  ) -> None:
    """Publishes nothing: generators have what the step would give them."""
    logging.warning(
      "Step %d is made of other groups: %s (loss %.3g, gradient norm %.3g, "
      "worst in group %.0f, member %.0f). Its groups are dropped.",
      step,
      reason,
      metrics["train/loss"],
      metrics["train/grad_norm"],
      metrics.get("train/worst_group_id", math.nan),
      metrics.get("train/worst_member", math.nan),
    )
    end_s = time.perf_counter()
    self._trace.span(self._track, f"step {step} ({reason})", start_s, end_s)
    self.busy_s += end_s - start_s
    self._post(Skipped(step=step, reason=reason))

  def _check_changed(
    self, publication: store_lib.Publication, metrics: Mapping[str, float]
  ) -> None:
    """Refuses a version that a step has made and that is the one before.

    Generators would go on with old weights, whose checksums are right. What is
    published in full moves by any step, for some weights are close to 0. In
    fewer digits, or where Adam's eps outweighs the gradient, a whole step may
    be rounded off, and adds up until it is not: that is counted.

    Raises:
      RuntimeError: it is published in full, and nothing has changed.
    """
    grad_norm, lr = metrics["train/grad_norm"], metrics["train/lr"]
    has_moved = grad_norm > 0 and lr > 0
    if publication.num_changed or not has_moved:
      return
    found = (
      f"Version {publication.version} is published with 0 of "
      f"{len(publication.checksums)} arrays changed, after a step of gradient "
      f"norm {grad_norm:.3g} at config.trainer.lr {lr:.3g}"
    )
    if not self._publishes_rounded and grad_norm > _FAINT_NORM:
      raise RuntimeError(
        f"{found}: what is published is not what was trained, or the learning "
        "rate is too small for any weight to change."
      )
    self._num_unchanged += 1
    logging.warning("%s: the step was too small for any weight.", found)
