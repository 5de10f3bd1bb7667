"""Whether a run kept its promises, by the files that it has left alone."""

import collections
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dora_jax.coordinator import events as ev
from dora_jax.runtime import pieces, record

# Why a group may be missing from training, where a schedule made rewards fail.
REWARD_REASONS = {"reward_failed", "reward_timed_out", "reward_quarantined"}


def check(
  workdir: pathlib.Path, config: Any, *, num_groups: int, may_drop: bool
) -> list[str]:
  """What does not hold, a sentence each; [] is well.

  Args:
    workdir: of a run that has ended with its data.
    config: of the run.
    num_groups: prompts of its one epoch.
    may_drop: whether rewards were made to fail.
  """
  summary = json.loads((workdir / "summary.json").read_text())
  commands, versions = _replayed(workdir, config)
  found = _summary_faults(summary, config)
  found += _group_faults(
    commands, summary, num_groups=num_groups, may_drop=may_drop
  )
  found += _version_faults(commands, versions, config)
  found += _line_faults(workdir, config, num_steps=int(summary["steps"]))
  last = workdir / "checkpoints" / str(int(summary["steps"]))
  if not last.is_dir():
    found.append(f"There is no checkpoint of the last step, {last.name}.")
  return found


def _replayed(
  workdir: pathlib.Path, config: Any
) -> tuple[list[ev.Command], dict[tuple[int, int], int]]:
  """All commands of the run, and the version that each member came from."""
  shape = pieces.make_model_config(config, pieces.make_tokenizer(config))
  coordinator = pieces.make_coordinator(config, shape)
  commands: list[ev.Command] = []
  versions: dict[tuple[int, int], int] = {}
  for event, now_s in record.read_events(workdir / record.FILE_NAME)[1]:
    if isinstance(event, ev.Resumed):
      # What the process that resumed has begun with; see saving.Saver.order.
      snapshot = json.loads(json.dumps(coordinator.snapshot()))
      coordinator = pieces.make_coordinator(config, shape)
      coordinator.restore(snapshot)
    elif isinstance(event, ev.Finished):
      versions[event.group_id, event.member] = event.version
    commands += coordinator.handle(event, now_s)
  return commands, versions


def _summary_faults(summary: Mapping[str, Any], config: Any) -> list[str]:
  most = config.coordinator.max_staleness
  bounds = {"mixed": 0, "lag_max": most, "versions_alive_max": most + 1}
  found = [
    f"{name} is {summary[name]}, above {bound}."
    for name, bound in bounds.items()
    if not summary[name] <= bound
  ]
  return found + _imbalance(summary, "summary.json", "")


def _imbalance(values: Mapping[str, Any], where: str, prefix: str) -> list[str]:
  """Whether every token generated is in exactly one place."""
  places = ("open", "ready", "in_batch", "trained", "dropped")
  parts = [values[f"{prefix}{place}_tokens"] for place in places]
  generated = values[f"{prefix}generated_tokens"]
  if generated == sum(parts):
    return []
  return [f"{where}: {generated} tokens generated, but {parts} accounted for."]


def _group_faults(
  commands: Sequence[ev.Command],
  summary: Mapping[str, Any],
  *,
  num_groups: int,
  may_drop: bool,
) -> list[str]:
  """Whether each prompt was trained once, or dropped with a known reason."""
  # A step that was cut off is commanded again by the run that goes on.
  steps = {c.step: c.group_ids for c in commands if isinstance(c, ev.Train)}
  trained = collections.Counter(g for ids in steps.values() for g in ids)
  dropped = {c.group_id: c.reason for c in commands if isinstance(c, ev.Drop)}
  found = [f"Group {g} trained {n} times." for g, n in trained.items() if n > 1]
  found += [f"Group {g} trained and dropped." for g in trained & dropped.keys()]
  missing = set(range(num_groups)) - trained.keys() - dropped.keys()
  found += [f"Group {g} neither trained nor dropped." for g in sorted(missing)]
  surplus = (trained.keys() | dropped.keys()) - set(range(num_groups))
  found += [f"Group {g} is beyond the data." for g in sorted(surplus)]
  allowed = REWARD_REASONS if may_drop else set()
  found += [
    f"Group {group} dropped: {reason}."
    for group, reason in dropped.items()
    if reason not in allowed
  ]
  if summary["trained"] != 4 * len(trained):
    found.append(
      f"summary.json has {summary['trained']} trajectories trained, the record "
      f"of events {4 * len(trained)}."
    )
  return found


def _version_faults(
  commands: Sequence[ev.Command],
  versions: Mapping[tuple[int, int], int],
  config: Any,
) -> list[str]:
  found = []
  for command in commands:
    if not isinstance(command, ev.Train):
      continue
    for group in command.group_ids:
      size = config.coordinator.group_size
      by = {versions.get((group, member), -1) for member in range(size)}
      if len(by) > 1:
        found.append(f"Group {group} is of versions {sorted(by)}.")
      if command.step - min(by) > config.coordinator.max_staleness:
        found.append(f"Step {command.step} trains version {min(by)}.")
      if max(by) > command.step:
        found.append(f"Step {command.step} trains a later version, {max(by)}.")
  return found


def _line_faults(
  workdir: pathlib.Path, config: Any, *, num_steps: int
) -> list[str]:
  """What metrics.jsonl and the sampled trajectories say against the run."""
  found = []
  metrics = _lines(workdir / "metrics.jsonl")
  steps = [each["step"] for each in metrics if "ledger/trained" in each]
  if set(steps) != set(range(1, num_steps + 1)):
    found.append(f"metrics.jsonl has steps {sorted(set(steps))}.")
  for each in metrics:
    if "ledger/trained" in each:
      found += _imbalance(each, f"metrics of step {each['step']}", "ledger/")
  sampled = _lines(workdir / "trajectories" / "sampled.jsonl")
  prompts: dict[int, str] = {}
  for each in sampled:
    if prompts.setdefault(each["group_id"], each["prompt"]) != each["prompt"]:
      found.append(f"Group {each['group_id']} had two prompts.")
    if each["lag"] > config.coordinator.max_staleness:
      found.append(f"A trajectory of step {each['step']} lags {each['lag']}.")
  return found


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """A file's JSON objects; a crash may have torn lines of this one."""
  found = []
  for line in path.read_text().splitlines():
    try:
      found.append(json.loads(line))
    except json.JSONDecodeError:
      if path.name == "metrics.jsonl":
        raise
  return found
