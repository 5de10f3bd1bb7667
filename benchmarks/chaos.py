"""Kills, starves and misleads a real run by seed, and looks at what it leaves.

  python -m benchmarks.chaos --out=DIR [--schedules=200] [--jobs=2] [--first=0]

A schedule is one to three attempts of the same command in one workdir, each of
which meets a fault (chaos_faults.py), and then the command by itself until it
ends. It survives where that reaches the end of the data and the files of the
workdir show every promise kept (chaos_checks.py). An attempt is forked off a
process that has imported all and started nothing, and shares a cache of
compiled code, so that hundreds fit into half an hour. The workdirs of those
that do not survive are kept.

summary.json: tried, survived, violations (sentences about files, and runs that
did not end); kind/NAME, how many attempts met it; resumed, attempts that went
on from a checkpoint; exit/STATUS, attempts by how they ended (-9: killed).
"""

import argparse
import collections
import json
import os
import pathlib
import random
import runpy
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

import jax

from benchmarks import chaos_checks, chaos_config, chaos_faults
from dora_jax import main as entry
from dora_jax.runtime import summary

_CONFIG = pathlib.Path(chaos_config.__file__)
# An attempt that takes longer hangs; a machine may have other work to do.
_LIMIT_S = 300.0
_MOST_TRIES = 3


def attempt(
  kind: str | None,
  folder: pathlib.Path,
  *,
  rng: random.Random,
  typical_s: float,
) -> int | None:
  """Runs the command once, with a fault or without; returns its exit status."""
  process = os.fork()
  if process == 0:
    _become_run(kind, folder, rng)
  return chaos_faults.inflict(
    kind or "none",
    process,
    workdir=folder / "workdir",
    typical_s=typical_s,
    rng=rng,
    limit_s=_LIMIT_S,
  )


def _become_run(
  kind: str | None, folder: pathlib.Path, rng: random.Random
) -> None:
  """Turns this process into the command; does not return."""
  status = 1
  try:
    os.setsid()
    log = os.open(folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    print(f"--- {kind}", flush=True)
    sys.argv = [
      "main.py",
      f"--config={_CONFIG}",
      f"--workdir={folder / 'workdir'}",
    ]
    if kind is not None:
      chaos_faults.prepare(kind, rng)
    # As the command does it; what it imports is there already.
    sys.modules.pop(entry.__name__)
    runpy.run_module("dora_jax.main", run_name="__main__", alter_sys=True)
  except SystemExit as end:
    status = end.code if isinstance(end.code, int) else int(bool(end.code))
  # The top of a process: it must not go on as the harness.
  except BaseException:
    traceback.print_exc()
  finally:
    sys.stdout.flush()
    os._exit(status)


def run_schedule(
  number: int, out: pathlib.Path, *, seed: int, typical_s: float
) -> dict[str, Any]:
  """Tries one schedule; returns what happened, JSON-able."""
  rng = random.Random(f"{seed} {number}")
  names, weights = zip(*chaos_faults.KINDS.items(), strict=True)
  kinds = rng.choices(names, weights, k=rng.choice((1, 1, 2, 3)))
  folder = out / f"schedule_{number}"
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  statuses: list[int | None] = []
  for kind in kinds:
    statuses.append(attempt(kind, folder, rng=rng, typical_s=typical_s))
  for _ in range(_MOST_TRIES):
    statuses.append(attempt(None, folder, rng=rng, typical_s=typical_s))
    if statuses[-1] == 0:
      break
    # A group dropped since its reward failed breaks C2, which is said so.
    if statuses[-1] == entry.EXIT_BROKEN and _has_reward_faults(kinds):
      break
  violations = _violations(folder, kinds, statuses)
  if not violations:
    shutil.rmtree(folder)
  return {
    "number": number,
    "kinds": kinds,
    "statuses": statuses,
    "violations": violations,
  }


def _has_reward_faults(kinds: list[str]) -> bool:
  return any(kind.startswith("reward_") for kind in kinds)


def _violations(
  folder: pathlib.Path, kinds: list[str], statuses: list[int | None]
) -> list[str]:
  may_drop = _has_reward_faults(kinds)
  allowed = (0, entry.EXIT_BROKEN) if may_drop else (0,)
  found = ["An attempt hangs." for status in statuses if status is None]
  if statuses[-1] not in allowed:
    return [*found, f"The run does not end by itself: {statuses}."]
  left = _left_behind(folder)
  found += [f"Process {process} is left." for process in left]
  path = folder / "violations.json"
  # In a process of its own: whoever starts JAX cannot fork runs any more.
  process = os.fork()
  if process == 0:
    _check(folder, path, may_drop)
  os.waitpid(process, 0)
  if not path.exists():
    return [*found, "The files cannot be checked: see log.txt."]
  found += json.loads(path.read_text())
  path.unlink()
  return found


def _check(folder: pathlib.Path, path: pathlib.Path, may_drop: bool) -> None:
  """Looks at the files and writes down what is wrong; does not return."""
  try:
    found = chaos_checks.check(
      folder / "workdir",
      chaos_config.get_config(),
      num_groups=chaos_config.NUM_PROMPTS,
      may_drop=may_drop,
    )
    path.write_text(json.dumps(found))
  except BaseException:
    with (folder / "log.txt").open("a") as log:
      traceback.print_exc(file=log)
  finally:
    os._exit(0)


def _left_behind(folder: pathlib.Path) -> list[int]:
  """Processes that still write into the schedule's log."""
  found = []
  log = str(folder / "log.txt")
  for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      if os.readlink(process / "fd" / "2") == log:
        found.append(int(process.name))
    except OSError:
      continue
  return found


def _work(
  numbers: list[int], out: pathlib.Path, *, seed: int, typical_s: float
) -> None:
  for number in numbers:
    start_s = time.monotonic()
    result = run_schedule(number, out, seed=seed, typical_s=typical_s)
    result["seconds"] = time.monotonic() - start_s
    with (out / "schedules.jsonl").open("a") as file:
      file.write(json.dumps(result) + "\n")


def _measure(out: pathlib.Path) -> float:
  """Seconds of a run without a fault, once all is compiled."""
  rng, seconds = random.Random(0), 0.0
  for _ in range(2):
    folder = out / "clean"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start_s = time.monotonic()
    status = attempt(None, folder, rng=rng, typical_s=0.0)
    seconds = time.monotonic() - start_s
    found = _violations(folder, [], [status])
    if found:
      raise RuntimeError(f"A run without a fault fails, see {folder}: {found}")
  return seconds


def summarise(results: list[Mapping[str, Any]]) -> dict[str, float]:
  """Counts of all schedules."""
  kinds = collections.Counter(k for each in results for k in each["kinds"])
  exits = collections.Counter(s for each in results for s in each["statuses"])
  return {
    "tried": len(results),
    "survived": sum(not each["violations"] for each in results),
    "violations": sum(len(each["violations"]) for each in results),
    "attempts": sum(exits.values()),
    **{f"kind/{kind}": kinds[kind] for kind in chaos_faults.KINDS},
    **{f"exit/{status}": n for status, n in sorted(exits.items(), key=str)},
  }


def main(argv: list[str]) -> int:
  """Tries all schedules; returns 0 where all survived."""
  parser = argparse.ArgumentParser(prog="benchmarks.chaos")
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--schedules", type=int, default=200)
  parser.add_argument("--first", type=int, default=0)
  parser.add_argument("--jobs", type=int, default=2)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args(argv)
  out = args.out.absolute()
  out.mkdir(parents=True, exist_ok=True)
  (out / "schedules.jsonl").unlink(missing_ok=True)
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_compilation_cache_dir", str(out / "compiled"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  start_s = time.monotonic()
  typical_s = _measure(out)
  print(f"A run without a fault takes {typical_s:.1f} s.", flush=True)
  numbers = list(range(args.first, args.first + args.schedules))
  workers = []
  for job in range(args.jobs):
    worker = os.fork()
    if worker == 0:
      _work(numbers[job :: args.jobs], out, seed=args.seed, typical_s=typical_s)
      os._exit(0)
    workers.append(worker)
  for worker in workers:
    os.waitpid(worker, 0)
  lines = (out / "schedules.jsonl").read_text().splitlines()
  results = [json.loads(line) for line in lines]
  values = summarise(results)
  values["seconds"] = time.monotonic() - start_s
  values["violations"] += len(numbers) - len(results)
  for name, value in values.items():
    print(f"{name:<28}{value:g}")
  for each in results:
    for sentence in each["violations"]:
      print(
        f"schedule {each['number']} ({', '.join(each['kinds'])}): {sentence}"
      )
  command = shlex.join(["python", "-m", "benchmarks.chaos", *argv])
  summary.write_summary(out, values, command=command)
  return 0 if values["survived"] == len(numbers) else 1


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
