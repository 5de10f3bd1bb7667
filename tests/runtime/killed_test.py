"""A real process is killed at any instant, and started again."""

import json
import os
import pathlib
import random
import signal

import pytest

from dora_jax import main
from dora_jax.coordinator import events as ev
from dora_jax.runtime import record, resuming
from tests.runtime import failures_test

_NUM_STEPS = 40
_CONFIG = f"""
from tests.runtime import tiny

def get_config():
  return tiny.config(
    mesh__host_devices=3,
    coordinator__num_steps={_NUM_STEPS},
    coordinator__max_staleness=2,
    checkpoint__every_steps=3,
  )
"""


def _start(config_path: pathlib.Path, workdir: pathlib.Path):
  process = failures_test.start(config_path, workdir)
  assert process.stdout is not None
  return process


def _read_steps(process, num_steps: int) -> None:
  """Reads on until so many more steps are made, or the run has ended."""
  for line in process.stdout:
    num_steps -= line.startswith("step ")
    if not num_steps:
      return


@pytest.mark.slow
def test_killed_and_started_again_it_trains_every_group_once(tmp_path):
  config_path, workdir = tmp_path / "config.py", tmp_path / "workdir"
  config_path.write_text(_CONFIG)
  rng = random.Random(0)
  for attempt in range(4):
    process = _start(config_path, workdir)
    _read_steps(process, rng.randint(1, 9))
    # To every process of the run, between two saves or in one.
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, attempt
  process = _start(config_path, workdir)
  stdout, stderr = process.communicate()
  assert process.returncode == 0, stderr
  assert "resumed at version" in stdout
  found = json.loads((workdir / "summary.json").read_text())
  assert found["steps"] == _NUM_STEPS and found["resumes"] >= 1
  assert found["dropped"] == found["mixed"] == 0
  assert found["trained"] == _NUM_STEPS * 2 * 4
  assert found["generated_tokens"] == found["trained_tokens"]
  versions = [
    event.version
    for event, _ in record.read_events(workdir / record.FILE_NAME)[1]
    if isinstance(event, ev.StepDone)
  ]
  assert versions == list(range(1, _NUM_STEPS + 1))
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  first = [
    step["step"]
    for step in map(json.loads, lines)
    if "train/loss" in step and "resumed" not in step
  ]
  assert first == sorted(set(first)) and set(first) <= {*versions}


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(tmp_path):
  config_path, workdir = tmp_path / "config.py", tmp_path / "workdir"
  config_path.write_text(
    _CONFIG.replace("checkpoint__every_steps=3", "checkpoint__every_steps=0")
  )
  process = _start(config_path, workdir)
  _read_steps(process, 5)
  # As a cluster does before it takes a machine away.
  process.send_signal(signal.SIGTERM)
  _, stderr = process.communicate()
  assert process.returncode == main.EXIT_TERMINATED, stderr
  (saved,) = (workdir / resuming.FOLDER).iterdir()
  process = _start(config_path, workdir)
  stdout, stderr = process.communicate()
  assert process.returncode == 0, stderr
  assert f"resumed at version {saved.name}" in stdout
  found = json.loads((workdir / "summary.json").read_text())
  assert found["steps"] == _NUM_STEPS and found["resumes"] == 1
  assert found["dropped"] == found["dropped_tokens"] == 0
