"""Runs the real coordinator on a virtual cluster, as a config describes.

  python -m dora_jax.simulate --config=configs/sim/NAME.py [--workdir=DIR]
  … --sweep='cluster.trainer_devices=32,48;coordinator.max_staleness=1,3' \
      [--best='lag_mean<=1']
  … --fit=CASE             the efficiencies that give what is published of it
  python -m dora_jax.simulate --calibrate=RUN --workdir=DIR

Any field of the config can be set on the way: --config.cluster.devices=64. A
config that names cases runs each of them. A workdir gets summary.json and, of a
sweep, a picture. --calibrate measures costs and lengths of a real run's workdir
and writes them into DIR/costs.json, for config.cost.file and
config.workload.lengths_file. The exit status is 2 where the config cannot run.
"""

import os
import pathlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.progress
from absl import app, flags, logging
from ml_collections import config_flags

from dora_jax import config as config_lib
from dora_jax.runtime import summary
from dora_jax.simulator import calibrate, fit, picture, sweep, tables

EXIT_CONFIG = 2
# Characters of a line where the output is no terminal.
_FILE_WIDTH = 160


def run(
  config: Any,
  settings: Sequence[sweep.Setting],
  *,
  num_processes: int,
  console: rich.console.Console,
) -> list[dict[str, float]]:
  """Runs the settings with a progress bar; what each measured, in order.

  Each is told when it ends, so that an interrupted sweep has shown something.
  """
  results: list[dict[str, float]] = [{}] * len(settings)
  with rich.progress.Progress(console=console, transient=True) as progress:
    task = progress.add_task("simulating", total=len(settings))
    for index, values in sweep.run(
      config, settings, num_processes=num_processes
    ):
      results[index] = values
      progress.console.print(
        f"{settings[index].name}: {values['tokens_per_s']:,.0f} tokens/s, "
        f"{values['step_s']:,.1f} s a step, lag {values['lag_mean']:.2f}",
        highlight=False,
      )
      progress.advance(task)
  return results


def summarise(
  config: Any,
  settings: Sequence[sweep.Setting],
  results: Sequence[Mapping[str, float]],
) -> dict[str, float]:
  """The flat map of summary.json: measure/setting, error/setting_devices."""
  published = config.published.to_dict()
  where = config.measure.where or config.cluster.devices
  flat: dict[str, float] = {}
  for setting, values in zip(settings, results, strict=True):
    name = setting.name.replace(" ", ",")
    flat |= {f"{measure}/{name}": value for measure, value in values.items()}
    for measure, found in published.get(setting.name, {}).items():
      is_main = measure == config.measure.error_of
      kind = "error" if is_main else f"error_{measure}"
      flat[f"{kind}/{name}_{where}"] = tables.error(
        measure, values[measure], found
      )
  return flat


def show(
  config: Any,
  settings: Sequence[sweep.Setting],
  results: Sequence[Mapping[str, float]],
  *,
  bound: sweep.Bound | None,
  console: rich.console.Console,
) -> int | None:
  """Prints the tables; returns the index of the best setting."""
  names = [setting.name for setting in settings]
  best = sweep.best(results, bound)
  console.print(tables.runs(names, results, best=best))
  published = config.published.to_dict()
  if any(name in published for name in names):
    console.print(tables.against_published(names, results, published))
  if len(names) > 1:
    under = ""
    if bound is not None:
      under = f" with {bound.measure} {bound.sign} {bound.value:g}"
    if best is None:
      console.print(f"No setting{under}.")
    else:
      values = results[best]
      console.print(
        f"Most tokens/s{under}: {names[best]} ({values['tokens_per_s']:,.0f} "
        f"tokens/s, lag {values['lag_mean']:.2f})."
      )
  return best


def main(argv: list[str]) -> int:
  """Does what the flags say."""
  # JAX tells of every backend that it does not find.
  logging.set_verbosity(logging.WARNING)
  console = rich.console.Console()
  if not console.is_terminal:
    console = rich.console.Console(width=_FILE_WIDTH)
  try:
    if len(argv) > 1:
      raise ValueError(f"Arguments {argv[1:]} mean nothing.")
    return _act(flags.FLAGS, console)
  except (ValueError, FileNotFoundError, RuntimeError) as error:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_CONFIG


def _act(values: Any, console: rich.console.Console) -> int:
  workdir = pathlib.Path(values.workdir) if values.workdir else None
  if values.calibrate:
    if workdir is None:
      raise ValueError("--calibrate needs a --workdir for what it measures.")
    path = calibrate.write(pathlib.Path(values.calibrate), workdir)
    console.print(f"Costs and lengths are in {path}.")
    return 0
  config = values.config
  if config is None:
    raise ValueError("--config is missing: name a configs/sim/NAME.py.")
  if values.fit:
    for field, value in fit_case(config, values.fit).items():
      console.print(f"config.{field} = {value:.4f}")
    return 0
  settings = sweep.cases(config)
  if values.sweep:
    settings = sweep.product(config, values.sweep)
  results = run(
    config, settings, num_processes=values.processes, console=console
  )
  bound = sweep.parse_bound(values.best) if values.best else None
  best = show(config, settings, results, bound=bound, console=console)
  if workdir is not None:
    command = shlex.join(["python", "-m", "dora_jax.simulate", *sys.argv[1:]])
    summary.write_summary(
      workdir, summarise(config, settings, results), command=command
    )
    names = [setting.name for setting in settings]
    picture.draw(names, results, workdir / "sweep.png", best=best)
  return 0


def fit_case(config: Any, name: str) -> dict[str, float]:
  """Fits the efficiencies to what is published of a case.

  Raises:
    ValueError: nothing is published of it, or too little.
  """
  published = config.published.to_dict().get(name, {})
  chosen = [each for each in sweep.cases(config) if each.name == name]
  needed = {"step_s", "rollout_not_hidden_s"}
  if not (chosen and needed <= published.keys()):
    raise ValueError(
      f"--fit is {name!r} but must be one of config.cases of which "
      f"config.published has {' and '.join(sorted(needed))}."
    )
  return fit.efficiencies(config, chosen[0], published)


def unknown_field(argv: list[str]) -> str | None:
  """What is wrong with a --config.FIELD that does not exist, if one is."""
  paths = [a.partition("=")[2] for a in argv if re.match("--?config=", a)]
  if not paths:
    return None
  return config_lib.explain_unknown(
    argv,
    config_lib.load(paths[-1].partition(":")[0]),
    fields_in="configs/sim/common.py",
  )


def define_flags() -> None:
  """Defines the flags; only where this is the program that runs."""
  config_flags.DEFINE_config_file(
    "config", None, "Python file with get_config().", lock_config=True
  )
  flags.DEFINE_string("workdir", None, "Folder for what is made.")
  flags.DEFINE_string("sweep", None, "Fields and their values, see above.")
  flags.DEFINE_string("best", None, "Bound of the best setting: MEASURE<=X.")
  flags.DEFINE_string("fit", None, "Case to fit efficiencies to.")
  flags.DEFINE_string("calibrate", None, "Workdir of a real run to measure.")
  flags.DEFINE_integer(
    "processes", os.cpu_count() or 1, "Settings that run at once."
  )


if __name__ == "__main__":
  if (wrong := unknown_field(sys.argv[1:])) is not None:
    print(f"error: {wrong}", file=sys.stderr)
    sys.exit(EXIT_CONFIG)
  define_flags()
  app.run(main)
