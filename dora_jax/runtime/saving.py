"""All of a run in a checkpoint, and a run out of all of it.

The cut is made by the runtime's thread when it hears of a step's end: the
coordinator has taken the step in, and nothing that follows from it has begun.
The trainer writes it before the next step, for its orders come one after
another. So the params of version v, the ledger at version v, and the groups
that it names belong to one instant. What was being generated is not saved but
asked for anew: what is sampled depends on the version, the group, the member
and the position alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from dora_jax import checkpoint, interfaces
from dora_jax.coordinator import coordinator as coordinator_lib
from dora_jax.runtime import canary as canary_lib
from dora_jax.runtime import (
  evaluation,
  executing,
  group_arrays,
  publishing,
  record,
  recorder,
  resuming,
  training,
)
from dora_jax.trainer import train_step
from dora_jax.weights import store as store_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saver:
  """Packs a run into checkpoints, and goes on from one.

  Attributes:
    found: the checkpoint to go on from; None where the run begins.
    every_steps: versions that it divides are saved; 0 has none.
    config: of the run, JSON-able.
  """

  found: resuming.Found | None
  every_steps: int
  config: dict[str, Any]
  # All that it packs.
  coordinator: coordinator_lib.Coordinator
  task: interfaces.Task
  executor: executing.Executor
  evaluator: evaluation.Evaluation
  results: recorder.Recorder
  events: record.EventWriter
  store: store_lib.WeightStore
  canary: canary_lib.Canary
  trainer: train_step.Trainer
  trainer_part: training.TrainerPart
  publisher: publishing.Publisher
  checkpoints: checkpoint.Checkpoints

  def is_due(self, version: int) -> bool:
    """Whether a version is to be saved when it is made."""
    return bool(self.every_steps) and version % self.every_steps == 0

  def order(self, now_s: float) -> training.SaveOrder:
    """Makes the cut; the trainer has made the coordinator's newest version.

    Args:
      now_s: of the coordinator's clock.
    """
    made = self.coordinator
    self.events.flush()
    entries, arrays = group_arrays.pack(
      self.executor.groups, self.executor.trained, made.ledger
    )
    needed = {*made.versions_held(), *self.evaluator.pending()}
    # Of a version that was lost with a mesh there is nothing to save.
    alive = needed & {*self.store.versions()} - {made.newest_version}
    older = {version: self.store.copy_of(version) for version in sorted(alive)}
    trees: dict[str, Any] = {"groups": arrays}
    if older:
      trees["versions"] = {str(v): params for v, (_, params) in older.items()}
    return training.SaveOrder(
      version=made.newest_version,
      extras={
        "format": resuming.FORMAT,
        "version": made.newest_version,
        "config": self.config,
        "coordinator": made.snapshot(),
        "now_s": now_s,
        "num_events": self.events.num_written,
        "groups": entries,
        "group_dtypes": {name: str(a.dtype) for name, a in arrays.items()},
        "versions": [
          {
            "version": version,
            "checksums": publication.checksums,
            "canary": self.canary.expected[version].tolist(),
            "form": _form(params),
          }
          for version, (publication, params) in older.items()
        ],
        "evaluation": self.evaluator.pending(),
        "results": self.results.state(),
      },
      trees=trees,
    )

  def resume(self) -> list[int]:
    """Puts everything as it was at the checkpoint that was found.

    Returns:
      Versions older than the newest that generators can be given again.
    """
    assert self.found is not None
    version, extras = self.found.version, self.found.extras
    state, _ = self.checkpoints.restore(version, self.trainer.abstract_state())
    self.trainer.restore(state, version=version)
    self.trainer_part.saved = version
    self._restore_memory(version, extras["trainer"])
    older = self._restore_versions(version, extras["versions"])
    self.publisher.publish()
    self.coordinator.restore(extras["coordinator"])
    arrays = self.checkpoints.tree(
      version,
      "groups",
      group_arrays.abstract(extras["groups"], extras["group_dtypes"]),
    )
    groups = group_arrays.unpack(extras["groups"], arrays, self.task)
    untrained = self.coordinator.ledger.untrained()
    self.executor.take_over(
      groups={g: data for g, data in groups.items() if g in untrained},
      trained={g: data for g, data in groups.items() if g not in untrained},
    )
    self.results.restore(extras["results"])
    self._request_evaluations(extras["evaluation"])
    self.results.note(f"resumed at version {version}")
    return older

  def _restore_memory(self, version: int, memory: dict[str, Any]) -> None:
    abstract = self.trainer.abstract_recalled(memory)
    recalled = {}
    if abstract:
      recalled = self.checkpoints.tree(version, "recalled", abstract)
    self.trainer.remember(memory, recalled)

  def _restore_versions(
    self, version: int, saved: Sequence[dict[str, Any]]
  ) -> list[int]:
    """Brings older versions back where generators still take their form."""
    abstract = self.publisher.abstract()
    form = _form(abstract)
    if not saved:
      return []
    if any(each["form"] != form for each in saved):
      logging.warning(
        "Versions %s were saved in another form than config.mesh and "
        "config.generator need now: their unfinished groups start anew.",
        [each["version"] for each in saved],
      )
      return []
    host = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), abstract)
    names = [str(each["version"]) for each in saved]
    trees = self.checkpoints.tree(
      version, "versions", dict.fromkeys(names, host)
    )
    for name, each in zip(names, saved, strict=True):
      self.store.readmit(
        each["version"],
        trees[name],
        checksums=each["checksums"],
        holder="coordinator",
      )
      self.canary.expected[each["version"]] = np.array(
        each["canary"], np.float32
      )
    return [each["version"] for each in saved]

  def _request_evaluations(self, versions: Sequence[int]) -> None:
    alive = self.store.versions()
    for version in versions:
      if version in alive:
        self.evaluator.request(version, must_run=True)
      else:
        logging.warning(
          "The evaluation of version %d was cut off, and that version is gone.",
          version,
        )


def _form(params: Any) -> list[list[Any]]:
  """Names, shapes and dtypes, by which two forms of params are told apart."""
  return [
    [jax.tree_util.keystr(path), list(leaf.shape), str(leaf.dtype)]
    for path, leaf in jax.tree.leaves_with_path(params)
  ]
