"""What remains of a run: summary.json, the closing table, broken promises."""

import json
import math
import os
import pathlib
import platform
import subprocess
from collections.abc import Mapping
from typing import Any, SupportsFloat

import jax


def write_summary(
  workdir: str | os.PathLike[str],
  values: Mapping[str, SupportsFloat],
  *,
  command: str,
) -> None:
  """Writes summary.json, whole or not at all.

  Args:
    workdir: folder of the run.
    values: flat map of name to number; what is not finite becomes null.
    command: that made the run.
  """
  numbers = {name: float(value) for name, value in values.items()}
  record: dict[str, Any] = {
    name: value if math.isfinite(value) else None
    for name, value in numbers.items()
  }
  record |= {"machine": machine(), "commit": commit(), "command": command}
  path = pathlib.Path(workdir) / "summary.json"
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_suffix(".json.part")
  part.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
  part.replace(path)


def machine() -> dict[str, Any]:
  """Describes what the numbers were measured on."""
  devices = jax.devices()
  memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return {
    "cores": _num_cores(),
    "cpu": _cpu_model(),
    "memory_gib": round(memory_bytes / 2**30, 1),
    "device_kind": devices[0].device_kind,
    "num_devices": len(devices),
    "python": platform.python_version(),
    "jax": jax.__version__,
  }


def commit() -> str:
  """The revision of this code, "-dirty" where files differ from it.

  "unknown" where the code is not a git checkout, such as an installed package
  that merely lies inside of another repository.
  """
  here = pathlib.Path(__file__)

  def git(*arguments: str) -> str | None:
    try:
      done = subprocess.run(
        ["git", *arguments],
        cwd=here.parent,
        capture_output=True,
        text=True,
        check=False,
      )
    except FileNotFoundError:  # no git on this machine
      return None
    return done.stdout.strip() if done.returncode == 0 else None

  if git("ls-files", "--error-unmatch", here.name) is None:
    return "unknown"
  revision = git("rev-parse", "HEAD")
  changes = git("status", "--porcelain", "--untracked-files=no")
  if revision is None or changes is None:
    return "unknown"
  return revision + ("-dirty" if changes else "")


def closing_table(
  values: Mapping[str, SupportsFloat],
  *,
  lag_counts: Mapping[int, int],
  dropped_by_reason: Mapping[str, int],
) -> str:
  """The lines that end a run on the terminal.

  Args:
    values: as in summary.json; what a run did not measure is left out.
    lag_counts: trained trajectories by lag in versions.
    dropped_by_reason: trajectories by why they were dropped.
  """
  formats = {
    "accuracy_before": ("accuracy before", "{:.1%}"),
    "accuracy_after": ("accuracy after", "{:.1%}"),
    "seconds": ("time", "{:.1f} s"),
    "steps": ("steps", "{:.0f}"),
    "tokens_per_s": ("speed", "{:,.0f} tokens/s"),
    "versions_alive_max": ("versions alive, most", "{:.0f}"),
    "lag_max": ("lag, most", "{:.0f} versions"),
    "mixed": ("mixed trajectories", "{:.0f}"),
    "dropped": ("dropped trajectories", "{:.0f}"),
    "generator_idle_share": ("generators idle", "{:.1%}"),
    "lag_mean": ("lag, mean", "{:.2f} versions"),
    "lag_in_flight_mean": ("  in flight", "{:.2f}"),
    "lag_in_queue_mean": ("  in queue", "{:.2f}"),
    "generated_tokens": ("tokens generated", "{:,.0f}"),
    "trained_tokens": ("  trained", "{:,.0f}"),
    "dropped_tokens": ("  dropped", "{:,.0f}"),
    "reprefilled": ("tokens prefilled again", "{:,.0f}"),
    "moved": ("requests moved", "{:,.0f}"),
    "mismatch_kl_k3": ("engine mismatch, KL", "{:.1e} nats a token"),
    "length_generated_mean": ("length, generated", "{:.1f} tokens"),
    "length_trained_mean": ("length, trained", "{:.1f} tokens"),
    "trainer_wait_data_s": ("trainer waited for data", "{:.1f} s"),
    "trainer_wait_straggler_s": ("  for the oldest straggler", "{:.1f} s"),
    "generator_wait_prompts_s": ("generators waited for prompts", "{:.1f} s"),
    "generator_wait_weights_s": ("  for weights", "{:.1f} s"),
    "generator_wait_pages_s": ("  for pages", "{:.1f} s"),
  }
  rows = [
    (label, form.format(float(values[name])))
    for name, (label, form) in formats.items()
    if name in values
  ]
  total = sum(lag_counts.values())
  rows += [
    (f"  lag {lag}", f"{count / total:.1%} ({count})")
    for lag, count in sorted(lag_counts.items())
    if total
  ]
  rows += [
    (f"  dropped: {reason}", str(count))
    for reason, count in sorted(dropped_by_reason.items())
  ]
  width = max((len(label) for label, _ in rows), default=0)
  return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def broken_promises(
  values: Mapping[str, SupportsFloat],
  *,
  max_staleness: int,
  may_mix: bool = False,
  may_drop: bool = False,
) -> list[str]:
  """What the run did against C1, C2 or C3, one sentence each; [] is well.

  Args:
    values: with `mixed`, `dropped`, `lag_max`, `versions_alive_max`.
    max_staleness: K of the run.
    may_mix: whether the schedule mixes versions in a trajectory by design.
    may_drop: whether the schedule drops trajectories by design.
  """
  bounds = (
    ("mixed", math.inf if may_mix else 0, "C1: one version a trajectory"),
    ("dropped", math.inf if may_drop else 0, "C2: none is thrown away"),
    ("lag_max", max_staleness, "C3: K bounds the lag"),
    ("versions_alive_max", max_staleness + 1, "C3: at most K + 1 live"),
  )
  return [
    f"{name} is {float(values[name]):g} but must be at most {bound:g} "
    f"({promise}; K = config.coordinator.max_staleness = {max_staleness})."
    for name, bound, promise in bounds
    # Said so that NaN, a count that got lost, is a broken promise too.
    if not float(values[name]) <= bound
  ]


def _num_cores() -> int:
  # What this process may use, where the system can tell; not on macOS.
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _cpu_model() -> str:
  info = pathlib.Path("/proc/cpuinfo")
  if info.exists():
    for line in info.read_text().splitlines():
      if line.startswith("model name"):
        return line.partition(":")[2].strip()
  return platform.processor() or platform.machine()
