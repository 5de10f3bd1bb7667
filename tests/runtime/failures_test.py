"""Runs that end early: by a fault, the data's end, Ctrl-C, a bad config."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from dora_jax import main
from dora_jax.runtime import build, canary, local, pieces
from tests.runtime import tiny

_ROOT = pathlib.Path(__file__).parents[2]
# Importing what a run needs takes seconds, on a busy machine many.
_PATIENCE_S = 60.0
_LONG_RUN = """
from tests.runtime import tiny

def get_config():
  return tiny.config(
    mesh__host_devices=3,
    coordinator__num_steps=100_000,
    evaluation__num_prompts=0,
  )
"""


def start(config_path: pathlib.Path, workdir: pathlib.Path, *arguments: str):
  """The command line in a process group of its own, as a shell starts it."""
  command = [sys.executable, "-m", "dora_jax.main", f"--config={config_path}"]
  return subprocess.Popen(
    [*command, f"--workdir={workdir}", *arguments],
    cwd=_ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )


@pytest.mark.parametrize(
  "wrong", [1.0, np.nan], ids=["other weights", "not a number"]
)
def test_weights_that_are_not_the_trainers_stop_the_run(tmp_path, wrong):
  config = tiny.config()
  with build.build(config, tmp_path) as made:
    made.trainer_part.publish()
    # As if the generators' copies had been made of other weights.
    expected = made.trainer_part._publisher._canary.expected
    expected[0] = expected[0] + np.float32(wrong)
    start_s = time.monotonic()
    with pytest.raises(
      local.PartFailed,
      match=r"generator mesh \d failed .*serves version 0, but .*"
      "config.runtime.canary_tolerance = 0.01",
    ) as caught:
      made.runtime.run()
  assert isinstance(caught.value.__cause__, ValueError)
  assert time.monotonic() - start_s < _PATIENCE_S


def test_the_canary_allows_its_tolerance_and_no_more():
  checked = canary.Canary(
    tokens=np.array([3, 4, 5], np.int32), tolerance_nats=0.5
  )
  checked.expected[2] = np.array([-1.0, -2.0], np.float32)
  checked.check(2, np.array([-1.5, -1.5], np.float32), who="generator 7")
  with pytest.raises(ValueError, match=r"generator 7 serves version 2.* 0.75"):
    checked.check(2, np.array([-1.0, -2.75], np.float32), who="generator 7")


def test_a_trainer_that_fails_stops_the_run_and_names_its_field(tmp_path):
  # Validation would refuse it: a prompt alone fills the row.
  config = tiny.config(trainer__row_length=6, evaluation__num_prompts=0)
  with pytest.raises(
    local.PartFailed,
    match=r"^trainer failed \(step 0\): ValueError: .*raise "
    "config.trainer.row_length",
  ):
    main.run(config, tmp_path, command="test")
  # What was written before stays valid, and what is good is saved.
  json.loads((tmp_path / "trace.json").read_text())
  assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 0
  assert (tmp_path / "checkpoints" / "0").is_dir()


@pytest.mark.parametrize(
  ("prompts_per_batch", "num_steps"), [(1, 7), (2, 4), (10, 1)]
)
def test_the_run_ends_with_its_data(tmp_path, prompts_per_batch, num_steps):
  # 9 sums of terms up to 2, of which 2 are held out: 7 groups.
  config = tiny.config(
    task__params={"max_term": 2},
    task__num_heldout=2,
    task__num_epochs=1,
    task__reward="tests.runtime.tiny_rewards:digits",
    coordinator__prompts_per_batch=prompts_per_batch,
    coordinator__num_steps=20,
    evaluation__num_prompts=2,
  )
  assert tiny.run(config, tmp_path) == 0
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["steps"] == num_steps and summary["dropped"] == 0
  lags = sum(v for k, v in summary.items() if k.startswith("lag_count/"))
  assert lags == 7 * config.coordinator.group_size
  assert (tmp_path / "checkpoints" / str(num_steps)).is_dir()
  # A line for each batch, with the first of its prompts.
  lines = (tmp_path / "trajectories/sampled.jsonl").read_text().splitlines()
  prompts = [json.loads(line)["prompt"] for line in lines]
  assert len(prompts) == len(set(prompts)) == num_steps
  task = pieces.make_task(config, pieces.make_tokenizer(config))
  heldout = {prompt.text for prompt in task.heldout_prompts()}
  assert not heldout & set(prompts)


def test_ctrl_c_ends_in_order(tmp_path):
  config_path, workdir = tmp_path / "long.py", tmp_path / "workdir"
  config_path.write_text(_LONG_RUN)
  process = start(config_path, workdir)
  # A run that hangs before its first step must not hang the test.
  watchdog = threading.Timer(3 * _PATIENCE_S, process.kill)
  watchdog.start()
  try:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
      seen.append(line)
      if line.startswith("step "):
        break
    # As a terminal sends it: to every process of the run.
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=_PATIENCE_S)
  finally:
    watchdog.cancel()
    process.kill()
    process.wait()
  assert process.returncode == main.EXIT_INTERRUPTED, (seen, stdout, stderr)
  assert "stopping: sigint" in stdout
  # What was under way is left undone, which breaks no promise.
  assert "promise" not in stderr and "Traceback" not in stderr
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["steps"] >= 1 and summary["mixed"] == 0
  assert (workdir / "checkpoints" / str(int(summary["steps"]))).is_dir()
  json.loads((workdir / "trace.json").read_text())


@pytest.mark.parametrize(
  ("argument", "said"),
  [
    ("--config.trainer.learning_rate=1", "learning_rate does not exist"),
    ("--config.coordinator.group_size=1", "group_size is 1 but must be"),
  ],
)
def test_a_bad_config_is_one_line(tmp_path, argument: str, said: str):
  process: Any = start(
    _ROOT / "configs" / "quickstart.py", tmp_path / "workdir", argument
  )
  stdout, stderr = process.communicate(timeout=_PATIENCE_S)
  assert process.returncode == main.EXIT_CONFIG, stderr
  assert stdout == ""
  lines = stderr.splitlines()
  assert len(lines) == 1 and lines[0].startswith("error: config."), stderr
  assert said in lines[0]
  assert not (tmp_path / "workdir").exists()
