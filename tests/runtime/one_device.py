"""Runs every schedule in a process that has one device; for a test of it.

  python -m tests.runtime.one_device WORKDIR

Prints, as the last line, a JSON object: schedule -> its summary.
"""

import json
import pathlib
import sys

import jax

from dora_jax import main
from dora_jax.coordinator.schedules import registry
from tests.runtime import tiny

_LONG = 60


def _completion_limit(group_id: int, member: int) -> int:
  return _LONG if group_id % 3 == 1 and member == 2 else 3


def _config(schedule: str):
  return tiny.config(
    coordinator__schedule=schedule,
    coordinator__max_staleness=2,
    coordinator__num_steps=6,
    coordinator__balance_period_s=0.05,
    task__reward="tests.runtime.tiny_rewards:digits",
    trainer__proximal="current",
    trainer__correction="tis",
    trainer__row_length=_LONG + 8,
    generator__max_length=_LONG + 8,
    generator__max_new_tokens=_LONG,
    generator__page_size=16,
    mesh__host_devices=1,
    mesh__colocated=True,
    mesh__num_generators=1,
    mesh__lanes=3,
  )


def _run_all(workdir: pathlib.Path) -> None:
  main.prepare_devices(_config("dora"))
  assert len(jax.devices()) == 1
  found = {}
  for schedule in registry.NAMES:
    ran = tiny.run_and_keep(
      _config(schedule),
      workdir / schedule,
      completion_limit=_completion_limit,
    )
    assert ran.reason == "finished"
    assert ran.broken == []
    assert ran.summary["generated_tokens"] <= ran.num_decoded
    found[schedule] = ran.summary
  print(json.dumps(found))


if __name__ == "__main__":
  _run_all(pathlib.Path(sys.argv[1]))
