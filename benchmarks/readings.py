"""Reads what runs have left behind, and folds it over the rounds."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Span = tuple[float, float]

# Sums that metrics.jsonl carries since the run's start -> the key of what they
# grew by in the measured steps. Those of the second table are given per step.
_COUNTED = {
  "rollout/mixed": "mixed",
  "ledger/reprefilled": "reprefilled",
  "ledger/moved": "moved",
  "ledger/moved_tokens": "moved_tokens",
}
_PER_STEP = {
  "rollout/trainer_wait_data_s": "wait_data_s",
  "rollout/trainer_wait_straggler_s": "wait_straggler_s",
}
_DROPPED = "rollout/groups_dropped"
_SLOT_STEPS = ("rollout/busy_slot_steps", "rollout/total_slot_steps")
_NEEDED = (*_COUNTED, *_PER_STEP, _DROPPED, *_SLOT_STEPS)
# Counts are added up over rounds, bounds are their largest, the rest medians.
_SUMS = ("mixed", "dropped", "reprefilled", "moved", "moved_tokens")
_MAXIMA = ("lag_max", "versions_max")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """One schedule of one round, measured.

  Attributes:
    schedule: its name in one_run.SETTINGS.
    round_id: which round.
    seed: of its lengths.
    workdir: what it has left behind.
    values: see `read`.
  """

  schedule: str
  round_id: int
  seed: int
  workdir: pathlib.Path
  values: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
  """The slices of a run's trace.json, in seconds of its own clock.

  Attributes:
    trainer: (start, end, version trained) of each step.
    generators: generator_id -> (start, end, version served) of its slices.
    step_ends: when each step was noted, the first step first.
  """

  trainer: Sequence[tuple[float, float, int]]
  generators: dict[int, list[tuple[float, float, int]]]
  step_ends: Sequence[float]

  def window(self, first_step: int, num_steps: int) -> Span:
    """From the end of the step before `first_step` to that of the last."""
    return (
      self.step_ends[first_step - 1],
      self.step_ends[first_step + num_steps - 1],
    )


def read_timeline(workdir: pathlib.Path) -> Timeline:
  """Reads trace.json; the evaluation's lane is no generator here."""
  events = json.loads((workdir / "trace.json").read_text())
  names = {
    event["tid"]: event["args"]["name"]
    for event in events
    if event["name"] == "thread_name"
  }
  trainer, generators, step_ends = [], {}, []
  for name in names.values():
    if name.startswith("generator "):
      generators[int(name.split()[1])] = []
  for event in events:
    if event["ph"] == "C" and event["name"] == "versions alive":
      step_ends.append(event["ts"] / 1e6)
    if event["ph"] != "X":
      continue
    start_s = event["ts"] / 1e6
    end_s = start_s + event["dur"] / 1e6
    track, name = names[event["tid"]], event["name"]
    if track == "trainer":
      trainer.append((start_s, end_s, int(name.removeprefix("step "))))
    elif track.startswith("generator ") and name.startswith("v"):
      version = int(name[1:])
      generators[int(track.split()[1])].append((start_s, end_s, version))
  return Timeline(trainer=trainer, generators=generators, step_ends=step_ends)


def idle_share(spans: Sequence[Span], window: Span) -> float:
  """Share of the window that no span covers; spans may overlap."""
  start_s, end_s = window
  covered_s, reached_s = 0.0, start_s
  for left, right in sorted(spans):
    left, right = max(left, reached_s), min(right, end_s)
    covered_s += max(0.0, right - left)
    reached_s = max(reached_s, right)
  return 1.0 - covered_s / (end_s - start_s)


def read(
  workdir: pathlib.Path,
  *,
  num_warmup: int,
  num_steps: int,
  num_trajectories: int,
  group_size: int,
  prompt_length: int,
) -> dict[str, float]:
  """The measured values of one run, by the first part of their summary key.

  Args:
    workdir: of a run that has finished.
    num_warmup: W, steps before the measured ones, at least 1.
    num_steps: N, measured steps: from the end of step W to that of step W + N.
    num_trajectories: of a step.
    group_size: M.
    prompt_length: tokens of every prompt.

  Raises:
    ValueError: a trajectory ended by a stop token, so that the work was not
      what other schedules get.
  """
  rows = _step_rows(workdir)
  before, after = rows[num_warmup - 1], rows[num_warmup + num_steps - 1]
  measured = rows[num_warmup : num_warmup + num_steps]
  if any(row["train/truncated_share"] != 1.0 for row in measured):
    raise ValueError(
      f"Some completions of {workdir} ended by a stop token, not by their "
      "length: the run must have no stop ids."
    )
  seconds = after["time_s"] - before["time_s"]
  tokens = num_steps * num_trajectories * prompt_length
  tokens += sum(row["train/num_tokens"] for row in measured)
  missing = [name for name in _NEEDED if name not in after]
  if missing:
    raise ValueError(f"metrics.jsonl of {workdir} has no {missing}.")
  grown = {name: after[name] - before[name] for name in _NEEDED}
  busy, total = (grown[name] for name in _SLOT_STEPS)
  return {
    "tokens_per_s": tokens / seconds,
    "step_s": seconds / num_steps,
    "train_s": statistics.median(row["train/step_s"] for row in measured),
    "bubble_share": 1.0 - busy / total,
    "generator_idle_share": _generators_idle(workdir, num_warmup, num_steps),
    "lag_mean": statistics.fmean(row["train/lag_mean"] for row in measured),
    "lag_max": max(row["train/lag_max"] for row in measured),
    "versions_max": max(row["rollout/versions_alive"] for row in measured),
    "dropped": grown[_DROPPED] * group_size,
    **{key: grown[name] for name, key in _COUNTED.items()},
    **{key: grown[name] / num_steps for name, key in _PER_STEP.items()},
  }


def rollout_s(workdir: pathlib.Path, step: int) -> float:
  """How long a synchronous run generated between two steps.

  From the first slice of a generator after step `step` - 1 has ended to the
  last one before step `step` begins.
  """
  timeline = read_timeline(workdir)
  start_s = timeline.step_ends[step - 1]
  end_s = next(start for start, _, s in timeline.trainer if s == step)
  spans = [
    (left, right)
    for slices in timeline.generators.values()
    for left, right, _ in slices
    if left >= start_s and right <= end_s
  ]
  return max(right for _, right in spans) - min(left for left, _ in spans)


def work(
  runs: Sequence[Run],
  *,
  lengths: Mapping[tuple[int, int], Sequence[int]],
  decode_step_s: float | None,
) -> dict[str, float]:
  """What the work is like: lengths, and the tail against the step.

  A synchronous step starts all of its requests at once, so its rollout takes
  longest * tau, with tau the seconds of a decode step. The tail is that time;
  it is set against the step of dora, which does not wait for it.

  Args:
    runs: of all rounds.
    lengths: (seed, step) -> tokens of each completion that a synchronous run
      trains on in this measured step.
    decode_step_s: tau where the pace sets it; else the runs of sync show it.
  """
  drawn = [length for step in lengths.values() for length in step]
  values = {
    "length_median": statistics.median(drawn),
    "length_mean": statistics.fmean(drawn),
    "length_max": max(drawn),
  }
  longest = statistics.fmean(map(max, lengths.values()))
  if decode_step_s is None:
    spans_s = [
      rollout_s(run.workdir, step)
      for run in runs
      if run.schedule == "sync"
      for seed, step in lengths
      if seed == run.seed
    ]
    if not spans_s:
      return values
    decode_step_s = statistics.fmean(spans_s) / longest
  values["decode_step_s"] = decode_step_s
  values["tail_s"] = longest * decode_step_s
  steps_s = [run.values["step_s"] for run in runs if run.schedule == "dora"]
  if steps_s:
    values["tail_over_step"] = values["tail_s"] / statistics.median(steps_s)
  return values


def _step_rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """The lines of metrics.jsonl that a training step wrote, in order."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  return [row for row in rows if "train/step_s" in row]


def _generators_idle(
  workdir: pathlib.Path, num_warmup: int, num_steps: int
) -> float:
  """Mean over generators (lanes) of the time in which they decoded nothing."""
  timeline = read_timeline(workdir)
  window = timeline.window(num_warmup, num_steps)
  return statistics.fmean(
    idle_share([(left, right) for left, right, _ in slices], window)
    for slices in timeline.generators.values()
  )


def by_schedule(names: Sequence[str], runs: Sequence[Run]) -> dict[str, float]:
  """`measure/schedule` -> its value over all rounds."""
  values = {}
  for key in runs[0].values:
    fold = max if key in _MAXIMA else sum if key in _SUMS else statistics.median
    for name in names:
      values[f"{key}/{name}"] = fold(
        run.values[key] for run in runs if run.schedule == name
      )
  return values


def quotients(
  runs: Sequence[Run], key: str, name: str, other: str
) -> list[float]:
  """A value of `name` over that of `other`, within each round."""
  values = {(run.schedule, run.round_id): run.values[key] for run in runs}
  rounds = sorted({run.round_id for run in runs})
  return [values[name, r] / values[other, r] for r in rounds]


def ratios(dora: str, name: str, runs: Sequence[Run]) -> dict[str, float]:
  """How many times the tokens/s of a schedule dora reaches.

  The ratio is taken within each round; its median, least and most are given.

  Args:
    dora: the setting to compare with.
    name: the schedule.
    runs: those of both, in every round.
  """
  found = quotients(runs, "tokens_per_s", dora, name)
  return {
    f"ratio/{dora}_over_{name}": statistics.median(found),
    f"ratio_min/{dora}_over_{name}": min(found),
    f"ratio_max/{dora}_over_{name}": max(found),
  }
