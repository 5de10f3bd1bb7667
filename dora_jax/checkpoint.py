"""Checkpoints on disk: a pytree of arrays and a few JSON values per step.

A thin layer over orbax. Saving is asynchronous; a step is written beside its
place and renamed when it is complete, so that `latest` never sees a part.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from orbax import checkpoint as ocp


class Checkpoints:
  """The checkpoints in one folder; `close` before the process ends."""

  def __init__(self, folder: str | pathlib.Path, *, max_to_keep: int) -> None:
    """Opens the folder, or makes it; removes what a crash left half written.

    Args:
      folder: holds a subfolder for each step.
      max_to_keep: older complete steps are deleted.
    """
    if max_to_keep < 1:
      raise ValueError(
        f"max_to_keep is {max_to_keep}, need at least 1: change "
        "config.checkpoint.max_to_keep."
      )
    self._folder = pathlib.Path(folder).absolute()
    self._manager = ocp.CheckpointManager(
      self._folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=max_to_keep, cleanup_tmp_directories=True
      ),
    )

  def save(self, step: int, state: Any, extras: Mapping[str, Any]) -> None:
    """Starts to write a step; first waits for the one being written.

    The arrays may be donated as soon as this returns.

    Args:
      step: not yet saved.
      state: pytree of jax arrays.
      extras: JSON-able.
    """
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        extras=ocp.args.JsonSave(dict(extras)),
      ),
    )

  def restore(
    self, step: int | None, abstract_state: Any
  ) -> tuple[Any, dict[str, Any]]:
    """Reads (state, extras) of a step.

    Args:
      step: None for the newest complete one.
      abstract_state: pytree of jax.ShapeDtypeStruct with the wanted
        shardings, which need not be those that were saved.

    Raises:
      FileNotFoundError: there is no such step.
      ValueError: saved shapes or structure differ from the wanted ones.
    """
    self._manager.wait_until_finished()
    steps = self._complete_steps()
    found = self.latest() if step is None else step
    if found not in steps:
      raise FileNotFoundError(
        f"{self._folder} holds complete checkpoints of steps {steps}, "
        f"need {'any' if step is None else step}."
      )
    restored = self._manager.restore(
      found,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract_state),
        extras=ocp.args.JsonRestore(),
      ),
    )
    return restored["state"], restored["extras"]

  def latest(self) -> int | None:
    """The newest complete step; None where there is none."""
    return max(self._complete_steps(), default=None)

  def close(self) -> None:
    """Waits until everything is written."""
    self._manager.close()

  def _complete_steps(self) -> list[int]:
    # From the disk, for what the manager remembers includes the step that is
    # still being written.
    names = ocp.path.step.standard_name_format()
    return sorted(found.step for found in names.find_all(self._folder))
