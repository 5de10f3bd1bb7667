"""What staleness does to learning: the quickstart task at K = 0, 1 and 3.

  python -m benchmarks.learning --out=DIR [--seeds=0,1,2,3,4] \
    [--max_staleness=0,1,3] [--steps=100]

Each run is `dora_jax.main` in a process of its own, never beside another. One
that is finished is not made again, so that the same command goes on where it
was interrupted. `fold` says what the numbers mean.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from dora_jax.runtime import summary

_CONFIG = "configs/quickstart.py"
_WIDTH_INCHES, _HEIGHT_INCHES = 8.0, 4.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What one run has left.

  Attributes:
    max_staleness: its K.
    seed: of everything in it.
    curve: version -> held-out accuracy, in order.
    values: its summary.json.
  """

  max_staleness: int
  seed: int
  curve: Mapping[int, float]
  values: Mapping[str, float]

  @property
  def accuracy(self) -> float:
    """Of the last version that was evaluated."""
    return self.curve[max(self.curve)]


def main() -> None:
  """Makes what runs are missing, then writes numbers and a picture."""
  args = _parse()
  runs = []
  for seed in args.seeds:
    for max_staleness in args.max_staleness:
      start_s = time.perf_counter()
      run = _run(args, max_staleness, seed)
      runs.append(run)
      print(
        f"K = {max_staleness}, seed {seed}: {run.accuracy:.1%} "
        f"({time.perf_counter() - start_s:.0f} s)",
        flush=True,
      )
  values = fold(runs)
  command = shlex.join(["python", "-m", "benchmarks.learning", *sys.argv[1:]])
  summary.write_summary(args.out, values, command=command)
  draw(runs, args.out / "learning.png")
  for name, value in values.items():
    print(f"{name:<24} {value:.4f}")


def fold(runs: Sequence[Run]) -> dict[str, float]:
  """Folds the runs of each K over their seeds.

  accuracy/K is the mean of the last evaluations and stderr/K its standard
  error, std / sqrt(seeds). Where there is a K = 0, gap/K is accuracy/K less
  accuracy/0, and gap_stderrs/K that in standard errors of the difference,
  sqrt(stderr/K^2 + stderr/0^2). A single seed has no standard error.
  """
  values: dict[str, float] = {}
  for bound in sorted({run.max_staleness for run in runs}):
    of_bound = [run for run in runs if run.max_staleness == bound]
    accuracies = [run.accuracy for run in of_bound]
    values[f"accuracy/{bound}"] = statistics.mean(accuracies)
    if len(accuracies) > 1:
      deviation = statistics.stdev(accuracies)
      values[f"stderr/{bound}"] = deviation / math.sqrt(len(accuracies))
    for name in ("lag_mean", "seconds"):
      values[f"{name}/{bound}"] = statistics.mean(
        run.values[name] for run in of_bound
      )
    values[f"seeds/{bound}"] = len(of_bound)
    if not bound or "accuracy/0" not in values:
      continue
    gap = values[f"accuracy/{bound}"] - values["accuracy/0"]
    values[f"gap/{bound}"] = gap
    error = math.hypot(
      values.get(f"stderr/{bound}", 0.0), values.get("stderr/0", 0.0)
    )
    if error:
      values[f"gap_stderrs/{bound}"] = gap / error
  return values


def draw(runs: Sequence[Run], path: pathlib.Path) -> None:
  """Writes a PNG of mean accuracy by version, in a band of one stderr."""
  figure, axes = plt.subplots(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES))
  for bound in sorted({run.max_staleness for run in runs}):
    curves = [run.curve for run in runs if run.max_staleness == bound]
    versions = sorted(set.intersection(*({*curve} for curve in curves)))
    points = [[curve[version] for curve in curves] for version in versions]
    means = [statistics.mean(values) for values in points]
    errors = [
      statistics.stdev(values) / math.sqrt(len(values))
      if len(values) > 1
      else 0.0
      for values in points
    ]
    axes.plot(versions, means, marker="o", markersize=3, label=f"K = {bound}")
    axes.fill_between(
      versions,
      [m - e for m, e in zip(means, errors, strict=True)],
      [m + e for m, e in zip(means, errors, strict=True)],
      alpha=0.2,
    )
  axes.set_xlabel("version (training steps)")
  axes.set_ylabel("held-out accuracy")
  axes.grid(alpha=0.3)
  axes.legend()
  figure.tight_layout()
  figure.savefig(path, dpi=150)
  plt.close(figure)


def _parse() -> argparse.Namespace:
  numbers = lambda text: [int(part) for part in text.split(",")]
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--seeds", type=numbers, default=[0, 1, 2, 3, 4])
  parser.add_argument("--max_staleness", type=numbers, default=[0, 1, 3])
  parser.add_argument("--steps", type=int, default=100)
  return parser.parse_args()


def _run(args: argparse.Namespace, max_staleness: int, seed: int) -> Run:
  """Reads a run that is finished; makes it first where it is not."""
  workdir = args.out / "runs" / f"k{max_staleness}_seed{seed}"
  if not (workdir / "summary.json").exists():
    # Of a run that was interrupted.
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir(parents=True)
    _make(args, workdir, max_staleness, seed)
  config = json.loads((workdir / "config.json").read_text())
  num_steps = config["coordinator"]["num_steps"]
  if num_steps != args.steps:
    raise ValueError(
      f"{workdir} holds a run of {num_steps} steps, not of --steps="
      f"{args.steps}: choose another --out."
    )
  curve = {}
  for line in (workdir / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    if "evaluation/accuracy" in record:
      curve[record["step"]] = record["evaluation/accuracy"]
  return Run(
    max_staleness=max_staleness,
    seed=seed,
    curve=dict(sorted(curve.items())),
    values=json.loads((workdir / "summary.json").read_text()),
  )


def _make(
  args: argparse.Namespace,
  workdir: pathlib.Path,
  max_staleness: int,
  seed: int,
) -> None:
  command = [sys.executable, "-m", "dora_jax.main", f"--config={_CONFIG}"]
  command += [f"--workdir={workdir}", f"--config.seed={seed}"]
  command += [f"--config.coordinator.max_staleness={max_staleness}"]
  command += [f"--config.coordinator.num_steps={args.steps}"]
  # All runs compile the same; the first one does.
  environment = os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str((args.out / "compiled").absolute()),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  log = workdir.with_suffix(".log")
  with log.open("w") as file:
    done = subprocess.run(
      command,
      stdout=file,
      stderr=subprocess.STDOUT,
      env=environment,
      check=False,
    )
  if done.returncode:
    tail = "\n".join(log.read_text().splitlines()[-15:])
    raise RuntimeError(f"{workdir.name} failed ({log}):\n{tail}")


if __name__ == "__main__":
  main()
