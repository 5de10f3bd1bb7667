"""Measures the five schedules, and dora without its parts, on the same work.

  python -m benchmarks.schedules --out=DIR [--modes=shared,paced] \
    [--rounds=N] [--steps=N] [--schedules=sync,dora] [--seed=0]

Each run is a process of its own, after the others and never beside them. In a
round every schedule runs once; the next round goes through them backward, so
that a machine that slows down or warms up favours none. README.md says what the
modes and the numbers mean.
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
from collections.abc import Sequence

import jax
import rich.console

from benchmarks import one_run, readings, tables, timeline
from dora_jax.runtime import summary

_FIVE = ("sync", "one_step_off", "partial_rollout", "replication", "dora")
# Steps before the measured ones: the first compiles or reads the cache, and
# what the trainer lacks meanwhile moves automatic RBS for K + 1 steps and more.
_WARMUP_STEPS = 10
# Steps after them, at most K + 1: towards its end a run starts nothing new,
# which would let work from before the measured steps pass for theirs.
_COOLDOWN_STEPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
  """One way to run schedules.

  Attributes:
    name: of the mode.
    heading: what it is, above its tables.
    paced: whether runs keep the pace of one_run.PACE.
    names: in one_run.SETTINGS, that run unless --schedules names others.
    num_rounds: unless --rounds says otherwise.
    num_steps: measured ones, unless --steps says otherwise.
    run_s: seconds that a run takes beside its steps, two idle cores given.
    step_s: seconds of a step, mean over the names, two idle cores given.
  """

  name: str
  heading: str
  paced: bool
  names: tuple[str, ...]
  num_rounds: int
  num_steps: int
  run_s: float
  step_s: float

  @property
  def num_all_steps(self) -> int:
    """Those before and after the measured ones included."""
    return _WARMUP_STEPS + self.num_steps + _COOLDOWN_STEPS

  @property
  def predicted_s(self) -> float:
    """What all rounds take, two idle cores given."""
    run_s = self.run_s + self.num_all_steps * self.step_s
    return self.num_rounds * len(self.names) * run_s


_SHARED = Mode(
  name="shared",
  heading="Shared: real time; trainer and generators share this machine's "
  "cores, so what idles costs nothing.",
  paced=False,
  names=_FIVE,
  num_rounds=3,
  num_steps=20,
  run_s=7.0,
  step_s=0.35,
)
_PACED = Mode(
  name="paced",
  heading="Paced: each device sleeps until an accelerator's time is over, as "
  f"if it had cores of its own ({one_run.PACE}).",
  paced=True,
  names=tuple(one_run.SETTINGS),
  num_rounds=1,
  num_steps=20,
  run_s=7.0,
  step_s=0.7,
)
_MODES = {mode.name: mode for mode in (_SHARED, _PACED)}
_SHOWN_STEPS = 4
# Who bounds the step -> dora as it is, and dora with RBS fixed at the cap.
_LAG_PAIRS = {
  "trainer_bound": ("dora", "dora_fixed_rbs"),
  "rollout_bound": ("dora_quick_trainer", "dora_fixed_rbs_quick_trainer"),
}
# Characters of a line where the output is no terminal.
_FILE_WIDTH = 140


def main() -> None:
  """Runs everything, writes tables and pictures."""
  args = _parse()
  modes = _read_modes(args)
  console = rich.console.Console()
  if not console.is_terminal:
    console = rich.console.Console(width=_FILE_WIDTH)
  predicted_s = sum(mode.predicted_s for mode in modes)
  console.print(f"About {predicted_s / 60:.0f} minutes on two idle cores.")
  start_s = time.perf_counter()
  jax.config.update("jax_num_cpu_devices", 3)
  command = shlex.join(["python", "-m", "benchmarks.schedules", *sys.argv[1:]])
  everything: dict[str, float] = {}
  for mode in modes:
    runs = _run_mode(args, mode, console)
    values = _values(mode, runs)
    prefix = "paced/" if mode.paced else ""
    everything |= {prefix + key: value for key, value in values.items()}
    # After each mode, so that what fails in the next one takes nothing away.
    summary.write_summary(args.out, everything, command=command)
    console.rule()
    console.print(mode.heading, highlight=False)
    console.print(tables.speed(mode.names, values))
    console.print(tables.price(mode.names, values))
    for line in tables.sentences(values):
      console.print(line, highlight=False)
    _draw(args.out, mode, runs)
  spent_s = time.perf_counter() - start_s
  console.print(f"{spent_s / 60:.1f} minutes in all.")


def _parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--modes", default=",".join(_MODES))
  parser.add_argument("--rounds", type=int, help="of each mode")
  parser.add_argument("--steps", type=int, help="measured ones of each run")
  parser.add_argument(
    "--schedules", help=f"of each mode, among {', '.join(one_run.SETTINGS)}"
  )
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  for flag in ("rounds", "steps"):
    number = getattr(args, flag)
    if number is not None and number < 1:
      parser.error(f"--{flag} is {number}; it must be at least 1.")
  return args


def _read_modes(args: argparse.Namespace) -> list[Mode]:
  """The modes to run, as the flags change them; each can run its schedules."""
  modes = []
  for mode_name in args.modes.split(","):
    if mode_name not in _MODES:
      raise ValueError(
        f"--modes has {mode_name!r}, which is not among {list(_MODES)}."
      )
    mode = _MODES[mode_name]
    names = args.schedules.split(",") if args.schedules else mode.names
    unknown = [name for name in names if name not in one_run.SETTINGS]
    if unknown:
      raise ValueError(
        f"--schedules has {unknown}, which are not among "
        f"{list(one_run.SETTINGS)}."
      )
    for name in names:
      one_run.check(one_run.SETTINGS[name], paced=mode.paced)
    mode = dataclasses.replace(
      mode,
      names=tuple(names),
      num_rounds=args.rounds or mode.num_rounds,
      num_steps=args.steps or mode.num_steps,
    )
    modes.append(mode)
  return modes


def _run_mode(
  args: argparse.Namespace, mode: Mode, console: rich.console.Console
) -> list[readings.Run]:
  """Runs all rounds of a mode, and says so after each run."""
  runs = []
  for round_id in range(mode.num_rounds):
    for name in mode.names if round_id % 2 == 0 else mode.names[::-1]:
      start_s = time.perf_counter()
      run = _measure(args, mode, name, round_id)
      runs.append(run)
      console.print(
        f"{mode.name} round {round_id} {name}: "
        f"{run.values['tokens_per_s']:,.0f} tokens/s, "
        f"{run.values['step_s']:.2f} s a step "
        f"({time.perf_counter() - start_s:.0f} s in all)"
      )
  return runs


def _measure(
  args: argparse.Namespace, mode: Mode, name: str, round_id: int
) -> readings.Run:
  """Runs one schedule in a process of its own and reads what it left."""
  workdir = args.out / mode.name / f"round{round_id}" / name
  if workdir.exists():
    raise ValueError(f"{workdir} exists: choose an --out that holds no runs.")
  workdir.mkdir(parents=True)
  command = [sys.executable, "-m", "benchmarks.one_run"]
  command += [f"--workdir={workdir}", f"--cache={args.out / 'compiled'}"]
  command += [f"--overrides={json.dumps(one_run.SETTINGS[name])}"]
  command += [f"--num_steps={mode.num_all_steps}"]
  # Every schedule of a round has the same lengths, each round others.
  seed = args.seed + round_id
  command += [f"--seed={seed}"]
  if mode.paced:
    command += ["--paced"]
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
    num_steps=mode.num_steps,
    num_trajectories=one_run.PROMPTS_PER_BATCH * one_run.GROUP_SIZE,
    group_size=one_run.GROUP_SIZE,
    prompt_length=one_run.PROMPT_TOKENS,
  )
  return readings.Run(
    schedule=name,
    round_id=round_id,
    seed=seed,
    workdir=workdir,
    values=values,
  )


def _values(mode: Mode, runs: Sequence[readings.Run]) -> dict[str, float]:
  """All values of a mode, without its prefix."""
  values = readings.by_schedule(mode.names, runs)
  for name in mode.names:
    dora = one_run.baseline(name)
    if dora in mode.names:
      values |= readings.ratios(dora, name, runs)
  steps = range(_WARMUP_STEPS, _WARMUP_STEPS + mode.num_steps)
  values |= readings.work(
    runs,
    lengths={
      (seed, step): one_run.lengths_of_step(step, seed=seed)
      for seed in {run.seed for run in runs}
      for step in steps
    },
    decode_step_s=one_run.PACE.decode_step_s if mode.paced else None,
  )
  if mode.paced:
    values |= _lag_pairs(mode, runs)
  return values


def _lag_pairs(mode: Mode, runs: Sequence[readings.Run]) -> dict[str, float]:
  """What finding RBS saves in lag, and what it costs in speed."""
  values: dict[str, float] = {}
  for bound, (auto, fixed) in _LAG_PAIRS.items():
    if auto in mode.names and fixed in mode.names:
      for key, measure in (("lag", "lag_mean"), ("speed", "tokens_per_s")):
        values[f"{key}_auto_over_fixed/{bound}"] = statistics.median(
          readings.quotients(runs, measure, auto, fixed)
        )
  return values


def _draw(out: pathlib.Path, mode: Mode, runs: Sequence[readings.Run]) -> None:
  """One picture a schedule and one of the five, from amid the last round."""
  folder = out if mode.paced else out / mode.name
  last = {run.schedule: run for run in runs}
  seconds = _SHOWN_STEPS * max(run.values["step_s"] for run in last.values())
  pictures = {}
  for name in mode.names:
    times = readings.read_timeline(last[name].workdir)
    start_s, end_s = times.window(_WARMUP_STEPS, mode.num_steps)
    middle_s = times.step_ends[_WARMUP_STEPS + mode.num_steps // 2 - 1]
    pictures[name] = timeline.Picture(
      title=f"{name}: {last[name].values['tokens_per_s']:,.0f} tokens/s",
      timeline=times,
      start_s=max(start_s, min(middle_s, end_s - seconds)),
    )
    path = folder / f"timeline_{name}.png"
    timeline.draw([pictures[name]], path, seconds=seconds)
  shown = [name for name in mode.names if name in _FIVE] or mode.names
  path = folder / "timelines.png"
  timeline.draw([pictures[name] for name in shown], path, seconds=seconds)


if __name__ == "__main__":
  main()
