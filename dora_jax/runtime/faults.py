"""What is done where a part has failed: what goes on, and what is kept.

A generator mesh that fails is gone for the rest of the run, which goes on with
the others. Any other part ends the run; so does the last generator.
"""

import traceback
from collections.abc import Callable, Mapping

import jax
from absl import logging

from dora_jax import checkpoint
from dora_jax.coordinator import events as ev
from dora_jax.runtime import evaluation, executing, part, saving
from dora_jax.weights import store as store_lib


class Losses:
  """Lets go of generator meshes that have failed; used by the runtime's thread.

  Attributes:
    causes: part -> why it is lost, in words.
    is_evaluation_lost: whether the lane of the evaluation was among them.
  """

  def __init__(
    self,
    *,
    parts: executing.Parts,
    executor: executing.Executor,
    store: store_lib.WeightStore,
    evaluator: evaluation.Evaluation,
  ):
    self.causes: dict[str, str] = {}
    self.is_evaluation_lost = False
    self._parts = parts
    self._executor = executor
    self._store = store
    self._evaluator = evaluator

  def take(
    self, failure: part.Failure, *, newest_version: int
  ) -> list[ev.Event] | None:
    """Frees what a failed part held.

    It has posted all that it had to say before, so that the coordinator knows
    what it has finished.

    Args:
      failure: of any part.
      newest_version: the coordinator's.

    Returns:
      What the coordinator is to hear, in this order; then come the moves that
      `Executor.end_lost_moves` ends. None where the run cannot go on: it was no
      generator, or the newest version's only copy was there.
    """
    lost = self._parts.generators_of(failure.part)
    if not lost:
      return None
    generator = self._parts.generators[lost[0]]
    versions = self._store.lose(
      self._parts.mesh_ids[lost[0]], [self._parts.names[g] for g in lost]
    )
    if versions and versions[-1] >= newest_version:
      return None
    self._executor.lose(lost, versions)
    self.causes[failure.part] = describe(failure)
    self._log(failure, lost, versions)
    # Its frames hold params, which would stay in memory with them.
    traceback.clear_frames(failure.error.__traceback__)
    generator.discard()
    if self._parts.evaluation_id in lost:
      self.is_evaluation_lost = True
      self._evaluator.lose()
    return [
      *(ev.VersionLost(version=version) for version in versions),
      *(
        ev.GeneratorLost(generator_id=generator_id)
        for generator_id in lost
        if generator_id != self._parts.evaluation_id
      ),
    ]

  def metrics(self) -> Mapping[str, float]:
    """What a step reports."""
    return {
      "rollout/meshes_lost": float(len(self.causes)),
      "weights/sent_again": float(self._store.num_retried),
    }

  def _log(
    self, failure: part.Failure, lost: list[int], versions: list[int]
  ) -> None:
    names = ", ".join(self._parts.names[g] for g in lost)
    logging.error(
      "%s. Lost are %s; their requests begin anew elsewhere%s.%s",
      self.causes[failure.part],
      names,
      f", those of the versions {versions} as of the newest"
      if versions
      else "",
      " No held-out accuracy is measured from now on."
      if self._parts.evaluation_id in lost
      else "",
      exc_info=failure.error,
    )


def describe(failure: part.Failure) -> str:
  """Which part has failed, at what, and by which exception."""
  return (
    f"{failure.part} failed ({failure.doing}): "
    f"{type(failure.error).__name__}: {failure.error}"
  )


def save_last_good(
  saver: saving.Saver,
  now_s: float,
  end_step: Callable[[int, Mapping[str, float]], None],
) -> str:
  """Saves the train state after a failure; says which checkpoint stands.

  Only a state that is whole is saved, with the coordinator as it belongs to it:
  a step that failed is asked for anew when the run is resumed; one that was
  made, but not published or not heard of any more, has been made, and what it
  measured is written down.

  Args:
    saver: of the run, whose parts have ended.
    now_s: of the coordinator's clock.
    end_step: writes down what a step has measured.
  """
  version = saver.trainer_part.usable_version()
  if version is None:
    return (
      "The train state is lost in the middle of a step: the last checkpoint "
      "that was saved before stands."
    )
  try:
    if version == saver.coordinator.newest_version + 1:
      event = ev.StepDone(version=version)
      saver.events.write(event, now_s)
      saver.coordinator.handle(event, now_s)  # Nobody is left to command.
      end_step(version, saver.trainer_part.measured)
    else:
      saver.executor.return_batch()
    saver.trainer_part.save(saver.order(now_s))
    saver.checkpoints.wait()
  # A device or a disk that has failed too must not hide the first failure.
  except (checkpoint.SaveFailed, jax.errors.JaxRuntimeError) as error:
    return (
      f"Version {version} could not be saved: {type(error).__name__}: {error}. "
      "The last checkpoint that was saved before stands."
    )
  return f"The checkpoint of version {version} is the last."
