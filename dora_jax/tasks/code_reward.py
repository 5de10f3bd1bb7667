"""Rewards answers that are programs, by what they print.

The program runs in a process of its own (code_sandbox.py) that has no network,
no file but those of an empty folder and of Python itself, no other process, and
limits of memory, time and output. Where the kernel grants no namespaces or has
no Landlock, Python's audit hooks refuse the same, which is no match for a
policy that looks for a way round them.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import connection
from typing import IO, Any

from dora_jax import types

_ROOT = pathlib.Path(__file__).parents[2]
_START = (
  f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
  "from dora_jax.tasks import code_sandbox; code_sandbox.main()"
)
# Beside the program's own time: to start Python on a busy machine.
_START_S = 20.0
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """How a program ended.

  Attributes:
    exit_status: 0 where it ran to its end, above 128 where a signal ended it;
      None where its time was up.
    output: what it printed, at most as much as it may.
    world: whether network and processes are out of reach by the kernel.
    files: whether files are.
  """

  exit_status: int | None
  output: str
  world: str
  files: str


def code_output(
  prompt: types.Prompt,
  completion: str,
  *,
  timeout_s: float = 5.0,
  memory_mib: int = 512,
) -> Mapping[str, float]:
  """1 where the completion's program prints the answer, space around aside.

  The program is the last block fenced by ```; without one, all of the text.
  "ran" tells a wrong output from a program that failed or took too long.
  """
  blocks = _FENCE.findall(completion)
  outcome = run_program(
    blocks[-1] if blocks else completion,
    timeout_s=timeout_s,
    memory_bytes=memory_mib << 20,
  )
  has_run = outcome.exit_status == 0
  is_right = has_run and outcome.output.strip() == prompt.answer.strip()
  return {"reward": float(is_right), "ran": float(has_run)}


def run_program(
  program: str,
  *,
  timeout_s: float,
  memory_bytes: int,
  output_bytes: int = 1 << 16,
  use_namespaces: bool = True,
) -> Outcome:
  """Runs a Python program that nobody has read.

  Args:
    program: its text.
    timeout_s: seconds after which it is killed.
    memory_bytes: most of its address space.
    output_bytes: most that it may print, and write into a file.
    use_namespaces: whether to ask the kernel, or to take audit hooks at once.

  Raises:
    RuntimeError: the process could not be confined, so nothing was run.
  """
  order = {
    "program": program,
    "memory_bytes": memory_bytes,
    "cpu_s": math.ceil(timeout_s) + 1,
    "file_bytes": output_bytes,
    "use_namespaces": use_namespaces,
  }
  with (
    tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    tempfile.TemporaryFile() as output,
  ):
    # The superuser's programs run as nobody.
    os.chmod(folder, 0o777)
    process, status = _start(order, folder, output)
    try:
      confined = _wait_until_confined(process, status)
      try:
        exit_status = process.wait(timeout_s)
      except subprocess.TimeoutExpired:
        exit_status = None
    finally:
      # The rest of its world ends with it.
      process.kill()
      process.wait()
    output.seek(0)
    text = output.read(output_bytes).decode("utf-8", "replace")
  return Outcome(exit_status=exit_status, output=text, **confined)


def _start(
  order: Mapping[str, Any], folder: str, output: IO[bytes]
) -> tuple[subprocess.Popen[bytes], int]:
  """The process, its order given, and where it tells that it is confined."""
  status, theirs = os.pipe()
  try:
    process = subprocess.Popen(
      # Neither the user's packages nor environment: they may hold secrets.
      [sys.executable, "-I", "-S", "-c", _START],
      stdin=subprocess.PIPE,
      stdout=output,
      cwd=folder,
      env={},
      pass_fds=[theirs],
    )
  finally:
    os.close(theirs)
  text = json.dumps({**order, "status_descriptor": theirs}).encode()
  assert process.stdin is not None
  with contextlib.suppress(BrokenPipeError), process.stdin as stream:
    stream.write(text)
  return process, status


def _wait_until_confined(
  process: subprocess.Popen[bytes], status: int
) -> dict[str, str]:
  """By what the process is held; it runs nothing before it has told."""
  try:
    is_told = connection.wait([status], _START_S)
    told = os.read(status, 4096) if is_told else b""
  finally:
    os.close(status)
  if not told:
    raise RuntimeError(
      "The process for a program could not be confined, so the program was not"
      f" run (exit status {process.poll()}; it has {_START_S} s): see what it"
      " wrote above, or set config.task.reward to a reward that runs no code."
    )
  return json.loads(told)
