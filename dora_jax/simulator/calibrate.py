"""Measures the costs and lengths of a real run, for simulations of its machine.

  decoding    seconds of all generators' slices in a step = decode steps *
              step_fixed + prefilled tokens * prefill_token, by a robust line
  training    train/step_s = train_fixed + tokens * train_token, likewise
  publishing  the median of weights/publish_s; loading, of the publish slices
  messages    from StepDone to the first Loaded that follows, less the load
  rewards     from Finished to Scored, the median

What a run of sync does not show is set beside something that it does: a move
takes two loads (a packing, an unpacking), and its KV nothing more.
"""

import dataclasses
import gzip
import json
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy import stats

from dora_jax.simulator import costs

# The first steps compile, or read what is compiled.
_NUM_SKIPPED = 3
_EVENTS = "events.jsonl.gz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Heard:
  """What the coordinator's events tell.

  Attributes:
    arguments: the config of the run.
    lengths: group_id -> sampled tokens of each member.
    reward_s: from Finished to Scored, median.
    load_s: from StepDone to the first Loaded after it, median.
  """

  arguments: dict[str, Any]
  lengths: dict[int, list[int]]
  reward_s: float
  load_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Drawn:
  """What the timeline tells.

  Attributes:
    decode_s: of each step, all generators' slices together.
    load_s: median of publish slices.
  """

  decode_s: list[float]
  load_s: float


def write(run: pathlib.Path, workdir: pathlib.Path) -> pathlib.Path:
  """Measures a run's workdir, and writes costs.json into another."""
  measured = measure(run)
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / "costs.json"
  path.write_text(json.dumps(measured, indent=2) + "\n")
  return path


def measure(run: pathlib.Path) -> dict[str, Any]:
  """Reads what a finished run has left behind.

  Returns:
    costs: the fields of `costs.Costs`.
    lengths: group_id -> sampled tokens of each member.
    reward_s: seconds of a reward, median.
    prompt_tokens: of a prompt, on average.

  Raises:
    ValueError: the run has made too few steps.
  """
  rows = _metrics(run)
  if len(rows) < _NUM_SKIPPED + 3:
    raise ValueError(
      f"{run} has {len(rows)} steps, but {_NUM_SKIPPED + 3} at least are "
      "needed: the first ones compile."
    )
  heard = _hear(run)
  samples = (run / "trajectories" / "sampled.jsonl").read_text().splitlines()
  prompt_tokens = statistics.fmean(
    len(json.loads(line)["prompt_tokens"]) for line in samples
  )
  made = _costs(rows, heard, _draw(run), prompt_tokens=prompt_tokens)
  return {
    "costs": dataclasses.asdict(made),
    "lengths": heard.lengths,
    "reward_s": heard.reward_s,
    "prompt_tokens": round(prompt_tokens),
  }


def _costs(
  rows: Sequence[dict[str, float]],
  heard: _Heard,
  drawn: _Drawn,
  *,
  prompt_tokens: float,
) -> costs.Costs:
  coordinator = heard.arguments["coordinator"]
  num_prompts = coordinator["prompts_per_batch"]
  step_s, prefill_s = _decoding(
    rows, drawn.decode_s, num_slots=heard.arguments["generator"]["slots"]
  )
  # The metrics count completions only; a step trains on their prompts too.
  num_prompt_tokens = num_prompts * coordinator["group_size"] * prompt_tokens
  train_token_s, train_fixed_s = _line(
    [
      row["train/num_tokens"] + num_prompt_tokens for row in rows[_NUM_SKIPPED:]
    ],
    [row["train/step_s"] for row in rows[_NUM_SKIPPED:]],
  )
  return costs.Costs(
    step_fixed_s=step_s,
    weights_read_s=0.0,
    kv_token_read_s=0.0,
    request_flops_s=0.0,
    kv_token_flops_s=0.0,
    prefill_token_s=prefill_s / (num_prompts * prompt_tokens),
    train_token_s=train_token_s,
    train_fixed_s=train_fixed_s,
    publish_s=_median(rows, "weights/publish_s"),
    load_s=drawn.load_s,
    move_fixed_s=2 * drawn.load_s,
    kv_token_move_s=0.0,
    kv_token_spill_s=0.0,
    switch_s=0.0,
    message_s=max(0.0, heard.load_s - drawn.load_s),
  )


def _decoding(
  rows: Sequence[dict[str, float]],
  decode_s: Sequence[float],
  *,
  num_slots: int,
) -> tuple[float, float]:
  """Seconds of a decode step, and of all prefill in a training step."""
  totals = [row["rollout/total_slot_steps"] / num_slots for row in rows]
  return _line(
    np.diff(totals)[_NUM_SKIPPED:].tolist(),
    list(decode_s[_NUM_SKIPPED + 1 : len(rows)]),
  )


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
  """Slope and intercept of a line; neither is below 0.

  The slope is the median of those between two points (Theil, Sen), so that
  steps during which the machine was busy with something else do not count.
  """
  if len(set(x)) == 1:
    return 0.0, statistics.median(y)
  slope, intercept = map(float, tuple(stats.theilslopes(y, x))[:2])
  if slope < 0:
    return 0.0, statistics.median(y)
  if intercept < 0:
    return statistics.median(np.array(y) / np.array(x)), 0.0
  return slope, intercept


def _median(rows: Sequence[dict[str, float]], name: str) -> float:
  return statistics.median(row[name] for row in rows[_NUM_SKIPPED:])


def _metrics(run: pathlib.Path) -> list[dict[str, float]]:
  lines = (run / "metrics.jsonl").read_text().splitlines()
  return [row for row in map(json.loads, lines) if "train/step_s" in row]


def _events(run: pathlib.Path) -> Iterator[list[Any]]:
  with gzip.open(run / _EVENTS, "rt") as file:
    yield from map(json.loads, file)


def _hear(run: pathlib.Path) -> _Heard:
  """Reads the record of events; its format is told in runtime/record.py."""
  events = _events(run)
  arguments = next(events)["arguments"]  # pyright: ignore
  lengths: dict[int, dict[int, int]] = {}
  finished_s: dict[tuple[int, int], float] = {}
  rewards_s, loads_s = [], []
  done_s = None
  for now_s, name, *values in events:
    if name == "Finished":
      _, group_id, member, _, num_tokens = values
      lengths.setdefault(group_id, {})[member] = num_tokens
      finished_s[group_id, member] = now_s
    elif name == "Scored":
      rewards_s.append(now_s - finished_s[values[0], values[1]])
    elif name == "StepDone":
      done_s = now_s
    elif name == "Loaded" and done_s is not None:
      loads_s.append(now_s - done_s)
      done_s = None
  return _Heard(
    arguments=arguments,
    lengths={
      group_id: [found[m] for m in sorted(found)]
      for group_id, found in sorted(lengths.items())
    },
    reward_s=statistics.median(rewards_s),
    load_s=statistics.median(loads_s[_NUM_SKIPPED:]),
  )


def _draw(run: pathlib.Path) -> _Drawn:
  """Reads trace.json."""
  events = json.loads((run / "trace.json").read_text())
  tracks = {
    event["tid"]: event["args"]["name"]
    for event in events
    if event["name"] == "thread_name"
  }
  ends_us = [
    event["ts"]
    for event in events
    if event["ph"] == "C" and event["name"] == "versions alive"
  ]
  decode_s, loads_s = [0.0] * (len(ends_us) + 1), []
  for event in events:
    if event["ph"] != "X":
      continue
    track = tracks[event["tid"]]
    if track.startswith("generator ") and event["name"].startswith("v"):
      step = int(np.searchsorted(ends_us, event["ts"]))
      decode_s[step] += event["dur"] / 1e6
    elif track.startswith("to mesh "):
      loads_s.append(event["dur"] / 1e6)
  return _Drawn(
    decode_s=decode_s[: len(ends_us)], load_s=statistics.median(loads_s)
  )
