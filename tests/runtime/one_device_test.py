"""With one device in all, trainer and three lanes take turns on it."""

import json
import os
import pathlib
import subprocess
import sys

from dora_jax.coordinator.schedules import registry

_ROOT = pathlib.Path(__file__).parents[2]
_PATIENCE_S = 240.0


def test_every_schedule_works_on_one_device(tmp_path):
  process = subprocess.run(
    [sys.executable, "-m", "tests.runtime.one_device", str(tmp_path)],
    cwd=_ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=_PATIENCE_S,
  )
  assert process.returncode == 0, process.stderr
  found = json.loads(process.stdout.splitlines()[-1])
  assert found.keys() == set(registry.NAMES)
  for schedule, summary in found.items():
    assert summary["steps"] == 6
    if schedule != "replication":
      assert summary["dropped"] == 0
    if schedule != "partial_rollout":
      assert summary["mixed"] == summary["reprefilled"] == 0
    bound = {"sync": 0, "replication": 0, "one_step_off": 1}.get(schedule, 2)
    assert summary["lag_max"] <= bound
    assert summary["versions_alive_max"] <= bound + 1
  # Lanes do serve several versions of the one pool at a time.
  assert found["dora"]["versions_alive_max"] > 1
