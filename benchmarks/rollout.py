"""Measures the generator: against its bound, and against peers' samplers.

  python -m benchmarks.rollout --out=DIR [--tunix_python=PATH] \
    [--torch_python=PATH] [--parts=bound,curves,tunix,torch] [--pairs=5] \
    [--shapes=1.1M,29M,135M]

A peer runs in an environment of its own, whose interpreter the flags name;
README.md says how to make one. A pair is one run of the peer and one of ours,
one after the other, of the same lengths; both are warm.
"""

import argparse
import pathlib
import shlex
import sys
from collections.abc import Sequence

import jax
import matplotlib
import matplotlib.figure
import rich.console
import rich.table

from benchmarks import against, decode_bound, shapes
from dora_jax.runtime import summary

_PARTS = ("bound", "curves", "tunix", "torch")
_BOUND_CONTEXTS = (64, 256)
_BOUND_SHAPES = ("1.1M", "29M")
_BOUND_ROUNDS = 15
_CURVE_CONTEXTS = (32, 64, 128, 256, 512, 1024)
_CURVE_SLOTS = (1, 2, 4, 8, 16, 32, 64)
_CURVE_ROUNDS = 7


def main() -> None:
  """Runs the parts that are asked for; writes tables, pictures, a summary."""
  args = _parse()
  args.out.mkdir(parents=True, exist_ok=True)
  jax.config.update("jax_num_cpu_devices", against.MOST_GENERATORS)
  console = rich.console.Console()
  values: dict[str, float] = {}
  if "bound" in args.parts:
    _bound(args.shapes, console, values)
  if "curves" in args.parts:
    _curves(args.out, values)
  if "tunix" in args.parts:
    against.compare(
      "Tunix", against.TUNIX_CASES, against.tunix(args), args, console, values
    )
  if "torch" in args.parts:
    against.compare(
      "transformers",
      against.TORCH_CASES,
      against.torch(args),
      args,
      console,
      values,
    )
  command = shlex.join(["python", "-m", "benchmarks.rollout", *sys.argv[1:]])
  summary.write_summary(args.out, values, command=command)


def _parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--tunix_python", help="of an environment with Tunix")
  parser.add_argument("--torch_python", help="of one with transformers, torch")
  parser.add_argument("--parts", help=f"among {', '.join(_PARTS)}")
  parser.add_argument("--pairs", type=int, default=5)
  parser.add_argument(
    "--shapes",
    default=",".join(shapes.BY_NAME),
    help="of models, to leave others out; curves have one of their own",
  )
  args = parser.parse_args()
  args.shapes = args.shapes.split(",")
  for shape in args.shapes:
    if shape not in shapes.BY_NAME:
      parser.error(
        f"--shapes has {shape!r}, which is not among {[*shapes.BY_NAME]}."
      )
  pythons = {"tunix": args.tunix_python, "torch": args.torch_python}
  if args.parts is None:
    args.parts = [part for part in _PARTS if pythons.get(part, "") is not None]
  else:
    args.parts = args.parts.split(",")
  for part in args.parts:
    if part not in _PARTS:
      parser.error(f"--parts has {part!r}, which is not among {_PARTS}.")
    if pythons.get(part, "") is None:
      parser.error(f"--parts has {part!r}, so --{part}_python must be given.")
  if args.pairs < 1:
    parser.error(f"--pairs is {args.pairs}; it must be at least 1.")
  return args


def _bound(
  names: Sequence[str],
  console: rich.console.Console,
  values: dict[str, float],
) -> None:
  """A decode step over what it cannot take less than."""
  table = rich.table.Table(
    "model",
    "context",
    "step ms",
    "matmuls ms",
    "KV ms",
    "bound ms",
    "times its bound",
    title=f"A decode step of {against.SLOTS} slots",
  )
  for name in names:
    if name not in _BOUND_SHAPES:
      continue
    for reading in decode_bound.measure(
      shapes.BY_NAME[name],
      contexts=_BOUND_CONTEXTS,
      num_slots=against.SLOTS,
      num_rounds=_BOUND_ROUNDS,
    ):
      seconds = (
        reading.step_s,
        reading.matmul_s,
        reading.kv_s,
        reading.bound_s,
      )
      table.add_row(
        name,
        str(reading.context),
        *(f"{1e3 * each:.2f}" for each in seconds),
        f"{reading.ratio:.2f}",
      )
      key = f"{name}/{reading.context}"
      values[f"bound/step_ms/{key}"] = 1e3 * reading.step_s
      values[f"bound/ratio/{key}"] = reading.ratio
  console.print(table)


def _curves(out: pathlib.Path, values: dict[str, float]) -> None:
  """Time per token against context and against slots, as a picture."""
  config = shapes.SMALL
  by_context = decode_bound.measure(
    config,
    contexts=_CURVE_CONTEXTS,
    num_slots=against.SLOTS,
    num_rounds=_CURVE_ROUNDS,
  )
  by_slots = [
    decode_bound.measure(
      config, contexts=(64,), num_slots=num_slots, num_rounds=_CURVE_ROUNDS
    )[0]
    for num_slots in _CURVE_SLOTS
  ]
  figure = matplotlib.figure.Figure(figsize=(9, 3.6), layout="constrained")
  left, right = figure.subplots(1, 2)
  for axes, readings, attribute, label in (
    (left, by_context, "context", f"context, tokens ({against.SLOTS} slots)"),
    (right, by_slots, "num_slots", "slots (context 64)"),
  ):
    at = [getattr(reading, attribute) for reading in readings]
    token_us = [1e6 * r.step_s / r.num_slots for r in readings]
    bound_us = [1e6 * r.bound_s / r.num_slots for r in readings]
    axes.plot(at, token_us, marker="o", label="decode")
    axes.plot(at, bound_us, marker=".", linestyle="--", label="bound")
    axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    axes.set_ylabel("µs a token")
    axes.set_ylim(bottom=0)
    axes.legend()
    for where, micros in zip(at, token_us, strict=True):
      values[f"curve/token_us/{attribute}/{where}"] = micros
  figure.suptitle("Time per token, 1.1M parameters")
  figure.savefig(out / "time_per_token.png", dpi=120)


if __name__ == "__main__":
  main()
