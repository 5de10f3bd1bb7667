"""Checkpoints on disk: trees of arrays and a few JSON values per step.

A thin layer over orbax. Saving is asynchronous; a step is written beside its
place and renamed when it is complete, so that a scan of the folder never sees a
part. An older one is renamed away before it is deleted, and only once a newer
one is complete: at any instant there is at least one, if there ever was. The
JSON has a checksum, as a number that a disk has changed would be believed.
"""

import hashlib
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from orbax import checkpoint as ocp

_STATE, _EXTRAS = "state", "extras"
# Where steps that are to be deleted go first: one file of it less would leave
# what looks like a checkpoint.
_TRASH = ".deleted"
# Of files that hold no arrays: names, shapes, JSON.
_OVERHEAD_BYTES = 2**20


class SaveFailed(RuntimeError):
  """A checkpoint could not be written; those before it are as they were."""


class Checkpoints:
  """The checkpoints in one folder; `close` before the process ends."""

  def __init__(
    self,
    folder: str | pathlib.Path,
    *,
    max_to_keep: int,
    keep_every_steps: int = 0,
  ) -> None:
    """Opens the folder, or makes it; removes what a crash left half written.

    Args:
      folder: holds a subfolder for each step.
      max_to_keep: older complete steps are deleted.
      keep_every_steps: steps that it divides are never deleted; 0 has none.
    """
    if max_to_keep < 1:
      raise ValueError(
        f"max_to_keep is {max_to_keep}, need at least 1: change "
        "config.checkpoint.max_to_keep."
      )
    self._folder = pathlib.Path(folder).absolute()
    self._options = ocp.CheckpointManagerOptions(
      max_to_keep=max_to_keep,
      keep_period=keep_every_steps or None,
      cleanup_tmp_directories=True,
      todelete_subdir=_TRASH,
    )
    self._manager = self._open()
    self._being_saved: int | None = None
    self._empty_trash()

  def save(
    self,
    step: int,
    state: Any,
    extras: Mapping[str, Any],
    **trees: Any,
  ) -> None:
    """Starts to write a step; first waits for the one being written.

    The arrays may be donated as soon as this returns.

    Args:
      step: not yet saved.
      state: pytree of jax arrays.
      extras: JSON-able.
      **trees: further pytrees of arrays by name, none of them empty.

    Raises:
      SaveFailed: the step before could not be written to its end, or the disk
        has no room for this one.
    """
    self.wait()
    self._check_room(step, [state, trees])
    items = {
      _STATE: ocp.args.StandardSave(state),
      _EXTRAS: ocp.args.JsonSave(
        {"sha256": _digest(extras), "values": dict(extras)}
      ),
      **{name: ocp.args.StandardSave(tree) for name, tree in trees.items()},
    }
    try:
      self._manager.save(step, args=ocp.args.Composite(**items))
    # Whatever a file system, the library that writes to it, or a device from
    # which arrays are read may raise.
    except Exception as error:
      raise self._failed(step, error) from error
    self._being_saved = step

  def restore(
    self, step: int | None, abstract_state: Any
  ) -> tuple[Any, dict[str, Any]]:
    """Reads (state, extras) of a step; see `read_tree` and `read_extras`."""
    self.wait()
    state = read_tree(self._folder, step, _STATE, abstract_state)
    return state, read_extras(self._folder, step)

  def tree(self, step: int, name: str, abstract: Any) -> Any:
    """Reads one of the further trees of a step; see `read_tree`."""
    self.wait()
    return read_tree(self._folder, step, name, abstract)

  def latest(self) -> int | None:
    """The newest complete step; None where there is none."""
    return max(complete_steps(self._folder), default=None)

  def wait(self) -> None:
    """Waits until the step being saved is written.

    Raises:
      SaveFailed: it could not be.
    """
    step, self._being_saved = self._being_saved, None
    try:
      self._manager.wait_until_finished()
    except Exception as error:  # As above.
      raise self._failed(step, error) from error
    self._empty_trash()

  def close(self) -> None:
    """Waits until everything is written.

    Raises:
      SaveFailed: the step being saved could not be written.
    """
    try:
      self.wait()
    finally:
      self._manager.close()

  def _empty_trash(self) -> None:
    shutil.rmtree(self._folder / _TRASH, ignore_errors=True)

  def _open(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(self._folder, options=self._options)

  def _failed(self, step: int | None, error: Exception) -> SaveFailed:
    """Begins anew after a failure, of which the manager keeps a part."""
    self._manager = self._open()
    return SaveFailed(
      f"The checkpoint of step {step} could not be written: "
      f"{str(error)[:300]} … Complete in {self._folder}: steps "
      f"{complete_steps(self._folder)}."
    )

  def _check_room(self, step: int, trees: Any) -> None:
    """Raises SaveFailed where the arrays are more than the disk has room for.

    Compression may make them fewer, which no one can know before.
    """
    needed = _OVERHEAD_BYTES + sum(
      leaf.size * np.dtype(leaf.dtype).itemsize
      for leaf in jax.tree.leaves(trees)
    )
    free = shutil.disk_usage(self._folder).free
    if free < needed:
      raise SaveFailed(
        f"The checkpoint of step {step} needs {needed:,} bytes, but "
        f"{self._folder} has {free:,} free: make room, or lower "
        "config.checkpoint.max_to_keep."
      )


def complete_steps(folder: pathlib.Path) -> list[int]:
  """The steps that a folder holds whole, by a look at the disk."""
  names = ocp.path.step.standard_name_format()
  return sorted(found.step for found in names.find_all(folder.absolute()))


def read_state(
  folder: pathlib.Path, step: int | None, abstract_state: Any
) -> Any:
  """Reads the state of a step; see `read_tree`."""
  return read_tree(folder, step, _STATE, abstract_state)


def read_tree(
  folder: pathlib.Path, step: int | None, name: str, abstract: Any
) -> Any:
  """Reads a tree of arrays of a step; another process may be writing others.

  Args:
    folder: of checkpoints.
    step: None for the newest complete one.
    name: of the tree.
    abstract: pytree of jax.ShapeDtypeStruct with the wanted shardings, which
      need not be those that were saved, or of numpy arrays where the arrays are
      to be in host memory.

  Raises:
    FileNotFoundError: there is no such step.
    ValueError: saved shapes or structure differ from the wanted ones.
  """
  with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
    return reader.restore(
      _find(folder, step) / name, args=ocp.args.StandardRestore(abstract)
    )


def read_extras(folder: pathlib.Path, step: int | None) -> dict[str, Any]:
  """Reads the JSON values of a step.

  Args:
    folder: of checkpoints.
    step: None for the newest complete one.

  Raises:
    FileNotFoundError: there is no such step.
    ValueError: they are not what was saved.
  """
  path = _find(folder, step) / _EXTRAS
  try:
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
      saved = reader.restore(path, args=ocp.args.JsonRestore())
    if not isinstance(saved, dict) or set(saved) != {"sha256", "values"}:
      raise ValueError("it has no checksum")
    if _digest(saved["values"]) != saved["sha256"]:
      raise ValueError("its checksum is another")
  # Text that is no JSON, or nests too deep, is a ValueError or one of these.
  except (ValueError, RecursionError, FileNotFoundError) as error:
    raise ValueError(
      f"{path} is not what was saved ({error}): the checkpoint is damaged, or "
      f"of another release. Move {path.parent} away to go on from the one "
      "before, if there is one, or give another --workdir."
    ) from error
  return saved["values"]


def _digest(values: Any) -> str:
  """Of JSON values, alike before and after they were written."""
  read = json.loads(json.dumps(values))
  return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()


def _find(folder: pathlib.Path, step: int | None) -> pathlib.Path:
  steps = complete_steps(folder)
  found = max(steps, default=None) if step is None else step
  if found not in steps:
    raise FileNotFoundError(
      f"{folder} holds complete checkpoints of steps {steps}, "
      f"need {'any' if step is None else step}."
    )
  return folder.absolute() / str(found)
