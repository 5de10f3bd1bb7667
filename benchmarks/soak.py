"""Runs thousands of tiny steps in one process, and looks for what grows.

  python -m benchmarks.soak --out=DIR [--steps=2000]

summary.json: rss_slope_bytes_per_step and rss_slope_error, of a line through
the resident memory of every 50th step after the first 1,500, with the standard
error of that slope (see `slope`); throughput_ratio, seconds of steps 100 to 200
over those of the last 100; cpu_ratio, the same of CPU seconds of all threads,
which programs beside it lengthen less; versions_alive_max; pages_in_use at the
end; expected, versions whose canary is still kept. Memory is what this process
holds: what is free goes back to the system first, and pages of files, such as
code that is called late, are left out.
"""

import argparse
import ctypes
import gc
import os
import pathlib
import shlex
import sys
import time
from typing import Any

import jax
import numpy as np

from benchmarks import chaos_config
from dora_jax import config as config_lib
from dora_jax import main as main_lib
from dora_jax.runtime import build, summary

_EVERY = 50
# By then the allocators of all threads hold what they need at once.
_WARM_STEPS = 1500
# Bytes a step that no run notices: in a million steps, 50 megabytes. What is
# measured is finer than what allocators keep now and give back later.
_LEAST_SEEN = 50.0
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
  """Memory of this process's own that is in place; glibc and Linux tell it.

  What the allocators keep for later comes and goes by megabytes, so that it
  hides what grows.
  """
  gc.collect()
  ctypes.CDLL(None).malloc_trim(0)
  resident, of_files = map(int, _STATM.read_text().split()[1:3])
  return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


def slope(values: np.ndarray) -> tuple[float, float]:
  """Slope of a line through the memory of every 50th step, and its error.

  One that is above the line is followed by others that are. With a correlation
  r of neighbours the error is sqrt((1 + r) / (1 - r)) times that of independent
  ones.
  Source: Bayley and Hammersley (https://doi.org/10.2307/2983560).

  Returns:
    Both by step.
  """
  steps = _EVERY * np.arange(len(values))
  line, covariance = np.polyfit(steps, values, 1, cov=True)
  left = values - np.polyval(line, steps)
  alike = max(float((left[1:] * left[:-1]).sum() / (left**2).sum()), 0.0)
  error = np.sqrt(covariance[0, 0] * (1 + alike) / (1 - alike))
  return float(line[0]), float(error)


def main(argv: list[str]) -> int:
  """Runs and measures; returns 0 where nothing grows or slows down."""
  parser = argparse.ArgumentParser(prog="benchmarks.soak")
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--steps", type=int, default=2000)
  args = parser.parse_args(argv)
  num_steps = _WARM_STEPS + args.steps
  config = make_config(num_steps)
  main_lib.prepare_devices(config)
  config_lib.validate(config, num_devices=len(jax.devices()))
  # Written once already, so that what is measured here does not grow itself.
  memory = np.full(num_steps // _EVERY, -1.0)
  ends_s, spent_s = np.full((2, num_steps), -1.0)
  with build.build(config, args.out / "workdir") as made:
    real = made.results.step

    def step(version: int, values: Any) -> None:
      real(version, values)
      if version % _EVERY == 0:
        memory[version // _EVERY - 1] = rss_bytes()
      ends_s[version - 1] = time.perf_counter()
      spent_s[version - 1] = time.process_time()

    made.results.step = step
    made.trainer_part.publish()
    made.runtime.run()
    alive = made.runtime._coordinator.versions_alive_max
    pages = sum(part.worker.pages_in_use for part in made.generator_parts)
  gradient, error = slope(memory[_WARM_STEPS // _EVERY :])
  ratio = lambda x: float((x[200] - x[100]) / (x[-1] - x[-101]))
  values = {
    "steps": int((ends_s >= 0).sum()),
    "rss_slope_bytes_per_step": gradient,
    "rss_slope_error": error,
    "rss_first_mib": memory[_WARM_STEPS // _EVERY] / 2**20,
    "rss_last_mib": memory[-1] / 2**20,
    **{
      f"rss_mib/{at}": memory[at // _EVERY - 1] / 2**20
      for at in range(500, num_steps + 1, 500)
    },
    "throughput_ratio": ratio(ends_s),
    "cpu_ratio": ratio(spent_s),
    "versions_alive_max": alive,
    "pages_in_use": pages,
    "expected": len(made.trainer_part._publisher._canary.expected),
  }
  for name, value in values.items():
    print(f"{name:<28}{value:g}")
  command = shlex.join(["python", "-m", "benchmarks.soak", *argv])
  summary.write_summary(args.out, values, command=command)
  is_flat = gradient <= max(2 * error, _LEAST_SEEN)
  most = config.coordinator.max_staleness + 1
  # What grows with the run lengthens both, a busy machine mostly one.
  is_fast = max(values["throughput_ratio"], values["cpu_ratio"]) >= 0.97
  return 0 if is_flat and is_fast and alive <= most and not pages else 1


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
