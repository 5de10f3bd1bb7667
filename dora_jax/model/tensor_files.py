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
  if index.exists():
    weight_map = json.loads(index.read_text())["weight_map"]
    paths = [folder / name for name in sorted(set(weight_map.values()))]
  else:
    paths = [folder / _SINGLE]
  for path in paths:
    if not path.exists():
      raise FileNotFoundError(
        f"{path} does not exist but the checkpoint needs it: complete the "
        "folder, or change config.model."
      )
  return paths


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
