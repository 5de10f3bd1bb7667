"""A peer's sampler in a process of its own, asked for one run at a time."""

import json
import pathlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

_FOLDER = pathlib.Path(__file__).parent / "peers"


class Peer:
  """A script of benchmarks/peers, run by the interpreter of its environment."""

  def __init__(
    self,
    script: str,
    *,
    python: str,
    flags: Mapping[str, Any],
    log: pathlib.Path,
  ):
    self._log = log
    command = [python, str(_FOLDER / script)]
    command += [
      f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
      for name, value in flags.items()
    ]
    with log.open("w") as file:
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=file,
        text=True,
      )
    self.num_params = self._read()["num_params"]

  def ask(self, **question: Any) -> dict[str, Any]:
    """Has it make one run, and returns its answer."""
    assert self._process.stdin is not None
    self._process.stdin.write(json.dumps(question) + "\n")
    self._process.stdin.flush()
    return self._read()

  def close(self) -> None:
    """Ends the process."""
    assert self._process.stdin is not None
    self._process.stdin.close()
    self._process.wait(timeout=60)

  def _read(self) -> dict[str, Any]:
    assert self._process.stdout is not None
    # What is no object is chatter of the libraries.
    for line in self._process.stdout:
      if line.startswith("{"):
        return json.loads(line)
    code = self._process.wait()
    tail: Sequence[str] = self._log.read_text().splitlines()[-15:]
    raise RuntimeError(
      f"{self._process.args} ended with {code} ({self._log}):\n"
      + "\n".join(tail)
    )
