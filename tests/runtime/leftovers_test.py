"""Runs in processes of their own: how they end, and that nothing outlives them.

Each prints a message of docs/operations.md.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from dora_jax import main

_ROOT = pathlib.Path(__file__).parents[2]
_PATIENCE_S = 400.0
_CONFIG = """
from tests.runtime import tiny

def get_config():
  return tiny.config(
    mesh__host_devices=3,
    evaluation__num_prompts=0,
    coordinator__num_steps=4,
    task__num_epochs=1,
    task__params={{"max_term": 9}},
    task__reward="tests.runtime.tiny_rewards:{reward}",
    task__reward_timeout_s={timeout_s},
    runtime__give_up_s={give_up_s},
  )
"""
_MARK = "DORA_JAX_TEST_MARK"
_LOST = r"generator mesh \d failed \(decoding\): JaxRuntimeError: INTERNAL"
# Case -> exit status, steps made, newest checkpoint, what stderr says.
_CASES = {
  "one generator": (0, 4, 4, [_LOST + r".*begin anew elsewhere"]),
  "all generators": (
    main.EXIT_BROKEN,
    None,
    None,
    [r"The run has ended: No generator is left: " + _LOST],
  ),
  "trainer": (
    main.EXIT_BROKEN,
    1,
    1,
    [
      r"The run has ended: trainer failed \(step 1\): JaxRuntimeError",
      r"The checkpoint of version 1 is the last",
    ],
  ),
  "rewards": (
    # It keeps no promise: what has no reward is dropped.
    main.EXIT_BROKEN,
    4,
    4,
    [r"timed out after 1.0 s \(config.task.reward_timeout_s\)"],
  ),
  "hang": (
    main.EXIT_STALLED,
    None,
    None,
    [
      r"The run has ended: The run was at a stand",
      r"generator mesh 1 is at one thing, decoding",
      r"The process ends although generator mesh \d.* has not",
    ],
  ),
}


def marked(mark: str) -> list[str]:
  """Command lines of live processes that inherited this mark."""
  found = []
  for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      environment = (folder / "environ").read_bytes()
      if f"{_MARK}={mark}".encode() in environment.split(b"\0"):
        found.append((folder / "cmdline").read_text())
    except OSError:
      continue  # It has ended, or is another's.
  return found


def run(case: str, config_path: pathlib.Path, workdir: pathlib.Path):
  """Runs a case in its own process, of which nothing is left."""
  mark = f"{os.getpid()} {case}"
  done = subprocess.run(
    [
      *(sys.executable, "-m", "tests.runtime.faulty_run", case),
      *(f"--config={config_path}", f"--workdir={workdir}"),
      "--config.runtime.stall_s=30",
    ],
    cwd=_ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu", _MARK: mark},
    capture_output=True,
    text=True,
    timeout=_PATIENCE_S,
    check=False,
  )
  assert marked(mark) == []
  return done


@pytest.mark.slow
@pytest.mark.parametrize("case", _CASES)
def test_nothing_outlives_a_run_in_which_a_part_fails(tmp_path, case):
  if not pathlib.Path("/proc/self/environ").exists():
    pytest.skip("needs /proc")
  status, steps, saved, said = _CASES[case]
  config_path, workdir = tmp_path / "faulty.py", tmp_path / "workdir"
  config_path.write_text(
    _CONFIG.format(
      reward="hangs_for_some" if case == "rewards" else "digits",
      timeout_s=1.0 if case == "rewards" else 60.0,
      give_up_s=45.0 if case == "hang" else 0.0,
    )
  )
  done = run(case, config_path, workdir)
  assert done.returncode == status, done.stderr
  for pattern in said:
    assert re.search(pattern, done.stderr), (pattern, done.stderr)
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["mixed"] == 0 and summary["lag_max"] <= 1
  if steps is not None:
    assert summary["steps"] == steps
    assert (workdir / "checkpoints" / str(saved)).is_dir()
  quarantined = (workdir / "quarantine.jsonl").exists()
  assert quarantined == (case == "rewards")
  # On a busy machine compiling is a stall as well.
  assert (workdir / "stall.json").exists() or case != "hang"
  if case == "trainer":
    # The batch of the step that failed was kept: it is trained on after all.
    done = run("nothing", config_path, workdir)
    assert done.returncode == 0, done.stderr
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["resumes"] == 1
    lags = sum(v for k, v in summary.items() if k.startswith("lag_count/"))
    assert lags == 4 * 2 * 4 and summary["dropped"] == 0
