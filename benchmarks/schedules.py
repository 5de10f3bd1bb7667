"""Measures the five schedules, and dora without its parts, on the same work.

  python -m benchmarks.schedules --out=DIR [--rounds=N] [--steps=N] \
    [--schedules=sync,dora]

Each run is a process of its own, after the others and never beside them. In a
round every schedule runs once; the next round goes through them backward, so
that a machine that slows down or warms up favours none. README.md says what the
numbers mean.
"""

import argparse
import dataclasses
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import rich.console

from benchmarks import one_run, readings, tables, timeline
from dora_jax.runtime import summary

_FIVE = ("sync", "one_step_off", "partial_rollout", "replication", "dora")
_DORA = {"coordinator.schedule": "dora"}
# What can be run: name -> what it changes in the config of one_run.
SETTINGS: dict[str, dict[str, Any]] = {
  "sync": {"coordinator.schedule": "sync"},
  "one_step_off": {"coordinator.schedule": "one_step_off"},
  "partial_rollout": {
    "coordinator.schedule": "partial_rollout",
    "trainer.loss": "decoupled_ppo",
  },
  "replication": {"coordinator.schedule": "replication"},
  "dora": _DORA,
  # Ablations: dora without one part of Algorithm 1, and with the paper's RBS
  # fixed at the cap, (K + 1) P groups.
  "dora_no_moves": {**_DORA, "coordinator.moves": False},
  "dora_no_filling": {**_DORA, "coordinator.filling": False},
  "dora_no_repartition": {**_DORA, "coordinator.repartition": False},
  "dora_fixed_rbs": {**_DORA, "coordinator.rollout_groups": "64"},
}
# Steps before the measured ones: the first compiles or reads the cache, the
# others fill the pipeline.
_WARMUP_STEPS = 3
# Steps after them, at most K + 1: towards its end a run starts nothing new,
# which would let work from before the measured steps pass for theirs.
_COOLDOWN_STEPS = 4
_SHOWN_STEPS = 4
# Characters of a line where the output is no terminal.
_FILE_WIDTH = 120
# Counts are added up over rounds, bounds are their largest, the rest medians.
_SUMS = ("mixed", "dropped", "reprefilled", "moved", "moved_tokens")
_MAXIMA = ("lag_max", "versions_max")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """One schedule of one round, measured.

  Attributes:
    schedule: its name in SETTINGS.
    round_id: which round.
    seed: of its lengths.
    workdir: what it has left behind.
    values: see readings.read.
  """

  schedule: str
  round_id: int
  seed: int
  workdir: pathlib.Path
  values: Mapping[str, float]


def main() -> None:
  """Runs everything, writes tables and pictures."""
  args = _parse()
  names = args.schedules.split(",")
  unknown = [name for name in names if name not in SETTINGS]
  if unknown:
    raise ValueError(
      f"--schedules has {unknown}, which are not among {list(SETTINGS)}."
    )
  for name in names:
    one_run.check(SETTINGS[name])
  console = rich.console.Console()
  if not console.is_terminal:
    console = rich.console.Console(width=_FILE_WIDTH)
  runs = []
  for round_id in range(args.rounds):
    for name in names if round_id % 2 == 0 else names[::-1]:
      start_s = time.perf_counter()
      run = _measure(args, name, round_id)
      runs.append(run)
      console.print(
        f"round {round_id} {name}: {run.values['tokens_per_s']:,.0f} tokens/s, "
        f"{run.values['step_s']:.2f} s a step "
        f"({time.perf_counter() - start_s:.0f} s in all)"
      )
  values = {**_values_by_schedule(names, runs), **_ratios(names, runs)}
  values |= _work(runs, num_steps=args.steps)
  jax.config.update("jax_num_cpu_devices", 3)
  command = shlex.join(["python", "-m", "benchmarks.schedules", *sys.argv[1:]])
  summary.write_summary(args.out, values, command=command)
  console.print(tables.speed(names, values))
  console.print(tables.price(names, values))
  for line in tables.sentences(values):
    console.print(line, highlight=False)
  _draw(args.out, names, runs, num_steps=args.steps)


def _parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--steps", type=int, default=24)
  parser.add_argument("--schedules", default=",".join(_FIVE))
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  if args.rounds < 1 or args.steps < 1:
    parser.error(
      f"--rounds is {args.rounds} and --steps {args.steps}; both must be at "
      "least 1."
    )
  return args


def _measure(args: argparse.Namespace, name: str, round_id: int) -> Run:
  """Runs one schedule in a process of its own and reads what it left."""
  workdir = args.out / f"round{round_id}" / name
  if workdir.exists():
    raise ValueError(f"{workdir} exists: choose an --out that holds no runs.")
  workdir.mkdir(parents=True)
  command = [sys.executable, "-m", "benchmarks.one_run"]
  command += [f"--workdir={workdir}", f"--cache={args.out / 'compiled'}"]
  command += [f"--overrides={json.dumps(SETTINGS[name])}"]
  command += [f"--num_steps={_WARMUP_STEPS + args.steps + _COOLDOWN_STEPS}"]
  # Every schedule of a round has the same lengths, each round others.
  seed = args.seed + round_id
  command += [f"--seed={seed}"]
  log = workdir / "log.txt"
  with log.open("w") as file:
    done = subprocess.run(
      command, stdout=file, stderr=subprocess.STDOUT, check=False
    )
  if done.returncode:
    tail = "\n".join(log.read_text().splitlines()[-15:])
    raise RuntimeError(f"{name} of round {round_id} failed ({log}):\n{tail}")
  values = readings.read(
    workdir,
    num_warmup=_WARMUP_STEPS,
    num_steps=args.steps,
    num_trajectories=one_run.PROMPTS_PER_BATCH * one_run.GROUP_SIZE,
    group_size=one_run.GROUP_SIZE,
    prompt_length=one_run.PROMPT_TOKENS,
  )
  return Run(
    schedule=name,
    round_id=round_id,
    seed=seed,
    workdir=workdir,
    values=values,
  )


def _values_by_schedule(
  names: Sequence[str], runs: Sequence[Run]
) -> dict[str, float]:
  """`measure/schedule` -> its value over all rounds."""
  values = {}
  for key in runs[0].values:
    fold = max if key in _MAXIMA else sum if key in _SUMS else statistics.median
    for name in names:
      values[f"{key}/{name}"] = fold(
        run.values[key] for run in runs if run.schedule == name
      )
  return values


def _ratios(names: Sequence[str], runs: Sequence[Run]) -> dict[str, float]:
  """How many times the tokens/s of each schedule dora reaches.

  The ratio is taken within each round; its median, least and most are given.
  """
  speeds = {
    (run.schedule, run.round_id): run.values["tokens_per_s"] for run in runs
  }
  rounds = sorted({run.round_id for run in runs})
  values: dict[str, float] = {}
  if "dora" not in names:
    return values
  for name in names:
    if name == "dora":
      continue
    ratios = [speeds["dora", r] / speeds[name, r] for r in rounds]
    values[f"ratio/dora_over_{name}"] = statistics.median(ratios)
    values[f"ratio_min/dora_over_{name}"] = min(ratios)
    values[f"ratio_max/dora_over_{name}"] = max(ratios)
  return values


def _work(runs: Sequence[Run], *, num_steps: int) -> dict[str, float]:
  """What the work is like: lengths, and the tail against the step.

  A synchronous step starts all of its requests at once, so its rollout takes
  longest * tau, with tau the seconds of a decode step. The tail is that time;
  it is set against the step of dora, which does not wait for it.
  """
  values: dict[str, float] = {}
  drawn: list[int] = []
  longest: list[int] = []
  tails_s: list[float] = []
  for run in (run for run in runs if run.schedule == runs[0].schedule):
    for step in range(_WARMUP_STEPS, _WARMUP_STEPS + num_steps):
      drawn += one_run.lengths_of_step(step, seed=run.seed)
  for run in (run for run in runs if run.schedule == "sync"):
    for step in range(_WARMUP_STEPS, _WARMUP_STEPS + num_steps):
      longest.append(max(one_run.lengths_of_step(step, seed=run.seed)))
      tails_s.append(readings.rollout_s(run.workdir, step))
  values["length_median"] = statistics.median(drawn)
  values["length_mean"] = statistics.fmean(drawn)
  values["length_max"] = max(drawn)
  if tails_s:
    values["tail_s"] = statistics.fmean(tails_s)
    values["decode_step_s"] = sum(tails_s) / sum(longest)
  steps_s = [run.values["step_s"] for run in runs if run.schedule == "dora"]
  if tails_s and steps_s:
    values["tail_over_step"] = values["tail_s"] / statistics.median(steps_s)
  return values


def _draw(
  out: pathlib.Path,
  names: Sequence[str],
  runs: Sequence[Run],
  *,
  num_steps: int,
) -> None:
  """One picture a schedule and one of all, from amid the last round."""
  last = {run.schedule: run for run in runs}
  seconds = _SHOWN_STEPS * max(run.values["step_s"] for run in last.values())
  pictures = []
  for name in names:
    times = readings.read_timeline(last[name].workdir)
    picture = timeline.Picture(
      title=f"{name}: {last[name].values['tokens_per_s']:,.0f} tokens/s",
      timeline=times,
      start_s=times.step_ends[_WARMUP_STEPS + num_steps // 2 - 1],
    )
    pictures.append(picture)
    timeline.draw([picture], out / f"timeline_{name}.png", seconds=seconds)
  timeline.draw(pictures, out / "timelines.png", seconds=seconds)


if __name__ == "__main__":
  main()
