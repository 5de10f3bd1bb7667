"""The safetensors files of a folder: one file, or several with an index."""

import collections
import contextlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# What pickle reads may run code as it is read.
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class TensorFiles:
  """Opened files whose tensors are read one at a time."""

  def __init__(self, files: Mapping[str, Any]):
    """Takes the opened file that holds each tensor, by the tensor's name."""
    self._files = files
    self.names = frozenset(files)

  def shape(self, name: str) -> tuple[int, ...]:
    """The shape that the file declares."""
    return tuple(self._files[name].get_slice(name).get_shape())

  def read(self, name: str) -> np.ndarray:
    """The tensor, in the dtype that it is stored in."""
    return self._files[name].get_tensor(name)


@contextlib.contextmanager
def open_folder(folder: pathlib.Path) -> Iterator[TensorFiles]:
  """Opens a folder's tensors and closes them again."""
  file_of = {}
  with contextlib.ExitStack() as stack:
    for path in _find_files(folder):
      file = stack.enter_context(_open_file(path))
      for name in file.keys():  # noqa: SIM118, it is no mapping
        if name in file_of:
          raise ValueError(
            f"{path} holds the tensor {name!r}, which another file of the "
            "folder holds too: remove the file that does not belong to it."
          )
        file_of[name] = file
    yield TensorFiles(file_of)


def _find_files(folder: pathlib.Path) -> list[pathlib.Path]:
  index = folder / _INDEX
  names = _named_by_index(index) if index.exists() else [_SINGLE]
  paths = [folder / name for name in names]
  for path in paths:
    if not path.exists():
      others = sorted(p.name for p in folder.glob("*") if p.suffix in _PICKLED)
      hint = (
        f" {others[0]} is never read, for to open it can run code."
        if others
        else ""
      )
      raise FileNotFoundError(
        f"{path} does not exist but the checkpoint needs it: complete the "
        f"folder, or change config.model.{hint}"
      )
  return paths


def _named_by_index(index: pathlib.Path) -> list[str]:
  """The files of the folder that an index names, each once."""
  try:
    found = json.loads(index.read_text(encoding="utf-8"))
    names = {str(name) for name in found["weight_map"].values()}
  except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as e:
    raise ValueError(
      f"{index} maps no tensors to files ({type(e).__name__}: {e}): fetch it "
      "again, or change config.model."
    ) from e
  for name in names:
    if pathlib.Path(name).name != name or not name.endswith(".safetensors"):
      raise ValueError(
        f"{index} names the file {name!r}, but it must be a .safetensors file "
        "of the same folder: correct it, or change config.model."
      )
  return sorted(names)


def _open_file(path: pathlib.Path) -> Any:
  try:
    return safetensors.safe_open(path, framework="numpy")
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path} is no whole safetensors file ({error}; it has "
      f"{path.stat().st_size} bytes): fetch it again."
    ) from error


def write_folder(
  folder: pathlib.Path,
  tensors: Iterable[tuple[str, np.ndarray]],
  *,
  sizes_bytes: Mapping[str, int],
  max_file_bytes: int,
) -> None:
  """Writes tensors as they come, holding those of one file at a time.

  Args:
    folder: where to.
    tensors: names and arrays, in the order of sizes_bytes.
    sizes_bytes: of every tensor that will come.
    max_file_bytes: where to begin another file; one tensor may exceed it.
  """
  file_of = _assign_files(sizes_bytes, max_file_bytes)
  awaited = collections.Counter(file_of.values())
  gathered = {}
  for name, array in tensors:
    gathered[name] = array
    if len(gathered) == awaited[file_of[name]]:
      safetensors_numpy.save_file(
        gathered, folder / file_of[name], metadata={"format": "pt"}
      )
      gathered = {}
  if len(awaited) > 1:
    index = {
      "metadata": {"total_size": sum(sizes_bytes.values())},
      "weight_map": file_of,
    }
    (folder / _INDEX).write_text(json.dumps(index, indent=2))


def _assign_files(
  sizes_bytes: Mapping[str, int], max_file_bytes: int
) -> dict[str, str]:
  number, filled = 0, 0
  numbers = {}
  for name, size in sizes_bytes.items():
    if filled and filled + size > max_file_bytes:
      number, filled = number + 1, 0
    numbers[name] = number
    filled += size
  if number == 0:
    return dict.fromkeys(numbers, _SINGLE)
  return {
    name: f"model-{index + 1:05}-of-{number + 1:05}.safetensors"
    for name, index in numbers.items()
  }
