"""Runs thousands of tiny steps in one process, and looks for what grows.

  python -m benchmarks.soak --out=DIR [--steps=2000]

summary.json: rss_slope_bytes_per_step and rss_slope_error, of a line through
the resident memory of each step after the first quarter, with the standard
error of that slope (neighbours are alike, so the line is through means over 50
steps); throughput_ratio, seconds that the trainer took for steps 100 to 200
over those for the last 100; versions_alive_max; pages_in_use at the end;
expected, versions whose canary is still kept.
"""

import argparse
import os
import pathlib
import shlex
import sys
from typing import Any

import jax
import numpy as np

from benchmarks import chaos_config
from dora_jax import config as config_lib
from dora_jax.runtime import build, summary

_BLOCK = 50
_WARM_SHARE = 0.25
_STATM = pathlib.Path("/proc/self/statm")


def make_config(num_steps: int) -> Any:
  """The run of the chaos harness, without its end and its checkpoints."""
  config: Any = chaos_config.get_config()
  config.task.num_epochs = 0
  config.task.reward = "exact_match"
  config.coordinator.num_steps = num_steps
  config.checkpoint.every_steps = 0
  return config


def rss_bytes() -> int:
  """Memory of this process that is in place; Linux alone tells it."""
  return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope(values: np.ndarray) -> tuple[float, float]:
  """Slope of a line through means over blocks, a step, and its error."""
  num_blocks = len(values) // _BLOCK
  means = values[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK).mean(axis=1)
  steps = (np.arange(num_blocks) + 0.5) * _BLOCK
  (gradient, offset), covariance = np.polyfit(steps, means, 1, cov=True)
  del offset
  return float(gradient), float(np.sqrt(covariance[0, 0]))


def main(argv: list[str]) -> int:
  """Runs and measures; returns 0 where nothing grows or slows down."""
  parser = argparse.ArgumentParser(prog="benchmarks.soak")
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--steps", type=int, default=2000)
  args = parser.parse_args(argv)
  config = make_config(args.steps)
  jax.config.update("jax_num_cpu_devices", config.mesh.host_devices)
  config_lib.validate(config, num_devices=len(jax.devices()))
  memory: list[int] = []
  times_s: list[float] = []
  with build.build(config, args.out / "workdir") as made:
    real = made.results.step

    def step(version: int, values: Any) -> None:
      real(version, values)
      memory.append(rss_bytes())
      times_s.append(values["train/step_s"])

    made.results.step = step
    made.trainer_part.publish()
    made.runtime.run()
    alive = made.runtime._coordinator.versions_alive_max
    pages = sum(part.worker.pages_in_use for part in made.generator_parts)
  warm = int(len(memory) * _WARM_SHARE)
  gradient, error = slope(np.asarray(memory[warm:], np.float64))
  values = {
    "steps": len(memory),
    "rss_slope_bytes_per_step": gradient,
    "rss_slope_error": error,
    "rss_first_mib": memory[warm] / 2**20,
    "rss_last_mib": memory[-1] / 2**20,
    "throughput_ratio": sum(times_s[100:200]) / sum(times_s[-100:]),
    "versions_alive_max": alive,
    "pages_in_use": pages,
    "expected": len(made.trainer_part._canary.expected),
  }
  for name, value in values.items():
    print(f"{name:<28}{value:g}")
  command = shlex.join(["python", "-m", "benchmarks.soak", *argv])
  summary.write_summary(args.out, values, command=command)
  is_flat = gradient <= 2 * error
  most = config.coordinator.max_staleness + 1
  is_fast = values["throughput_ratio"] >= 0.97
  return 0 if is_flat and is_fast and alive <= most and not pages else 1


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
