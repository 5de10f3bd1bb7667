"""The trainer's thread: steps, publishes, saves."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

from dora_jax import checkpoint, trace, types
from dora_jax.runtime import canary as canary_lib
from dora_jax.runtime import part
from dora_jax.trainer import train_step
from dora_jax.weights import store as store_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stepped:
  """The trainer has made and published a version."""

  version: int
  metrics: Mapping[str, float]


class TrainerPart(part.Part):
  """Trains on what it is sent, publishes, saves."""

  def __init__(
    self,
    *,
    post: part.Post,
    trainer: train_step.Trainer,
    store: store_lib.WeightStore,
    canary: canary_lib.Canary,
    checkpoints: checkpoint.Checkpoints,
    save_every_steps: int,
    timeline: trace.Trace,
  ):
    super().__init__(name="trainer", post=post)
    self._trainer = trainer
    self._store = store
    self._canary = canary
    self._checkpoints = checkpoints
    self._save_every_steps = save_every_steps
    self._trace = timeline
    self._track = timeline.track("trainer", "trainer")
    self._publish_track = timeline.track("publish", "weights")
    self._saved: int | None = None
    self.busy_s = 0.0

  def publish(self) -> store_lib.Publication:
    """Makes the trainer's version available to generators."""
    start_s = time.perf_counter()
    version, params = self._trainer.version, self._trainer.params()
    publication = self._store.publish(version, params, holder="coordinator")
    logprobs = self._trainer.logprobs_of(params, self._canary.tokens)
    self._canary.expected[version] = logprobs[1:]
    self._trace.span(
      self._publish_track,
      f"v{version}",
      start_s,
      time.perf_counter(),
      bytes=publication.num_bytes,
      arrays_changed=publication.num_changed,
    )
    return publication

  def save(self) -> None:
    """Writes a checkpoint of the trainer's version, unless there is one."""
    if self._saved == self._trainer.version:
      return
    self._saved = self._trainer.version
    self._checkpoints.save(
      self._trainer.version,
      self._trainer.state(),
      {"version": self._trainer.version},
    )

  def work(self) -> None:
    """Makes a step of each list of groups that comes."""
    while True:
      self.begin("waiting for a batch")
      for groups in self.take(block=True):
        if groups is None:
          return
        self._step(groups)

  def _step(self, groups: Sequence[types.Group]) -> None:
    step = self._trainer.version
    self.begin(f"step {step}")
    start_s = time.perf_counter()
    metrics = dict(self._trainer.train(groups))
    trained_s = time.perf_counter()
    self.begin(f"publishing version {step + 1}")
    publication = self.publish()
    end_s = time.perf_counter()
    self._trace.span(self._track, f"step {step}", start_s, trained_s)
    metrics |= {
      "train/step_s": trained_s - start_s,
      "weights/publish_s": end_s - trained_s,
      "weights/arrays_changed": publication.num_changed,
    }
    if self._save_every_steps and (step + 1) % self._save_every_steps == 0:
      self.begin(f"saving version {step + 1}")
      self.save()
    self.busy_s += time.perf_counter() - start_s
    self._post(Stepped(version=step + 1, metrics=metrics))
