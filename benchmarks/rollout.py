"""Measures the generator: against its bound, and against peers' samplers.

  python -m benchmarks.rollout --out=DIR [--tunix_python=PATH] \
    [--torch_python=PATH] [--parts=bound,curves,tunix,torch] [--pairs=5]

A peer runs in an environment of its own, whose interpreter the flags name;
README.md says how to make one. A pair is one run of the peer and one of ours,
one after the other, of the same lengths; both are warm.
"""

import argparse
import dataclasses
import pathlib
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence

import matplotlib
import matplotlib.figure
import numpy as np
import rich.console
import rich.table

from benchmarks import decode_bound, our_generator, peer, shapes
from dora_jax.runtime import summary

_PARTS = ("bound", "curves", "tunix", "torch")
_SLOTS = 32
_PROMPT_TOKENS = 32
_BOUND_CONTEXTS = (64, 256)
_BOUND_ROUNDS = 15
_CURVE_CONTEXTS = (32, 64, 128, 256, 512, 1024)
_CURVE_SLOTS = (1, 2, 4, 8, 16, 32, 64)
_CURVE_ROUNDS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """What both sides generate.

  Attributes:
    name: of the case.
    shape: of the model, in shapes.BY_NAME.
    limit: most tokens of a completion.
    stops_early: whether completions end at about a fifth of the limit.
    num_batches: of 32 rows; we get all of them at once, as rollout does.
    num_pairs: at most, where a pair takes long.
  """

  name: str
  shape: str
  limit: int
  stops_early: bool
  num_batches: int
  num_pairs: int = 100


_TUNIX_CASES = (
  Case(
    name="1.1M, early stops",
    shape="1.1M",
    limit=256,
    stops_early=True,
    num_batches=4,
  ),
  Case(
    name="1.1M, none",
    shape="1.1M",
    limit=256,
    stops_early=False,
    num_batches=1,
  ),
  Case(
    name="29M, early stops",
    shape="29M",
    limit=256,
    stops_early=True,
    num_batches=2,
    num_pairs=2,
  ),
  Case(
    name="29M, none",
    shape="29M",
    limit=256,
    stops_early=False,
    num_batches=1,
    num_pairs=2,
  ),
)
_TORCH_CASES = (
  Case(
    name="135M, early stops",
    shape="135M",
    limit=64,
    stops_early=True,
    num_batches=2,
    num_pairs=3,
  ),
  Case(
    name="135M, none",
    shape="135M",
    limit=64,
    stops_early=False,
    num_batches=1,
    num_pairs=3,
  ),
)


def main() -> None:
  """Runs the parts that are asked for; writes tables, pictures, a summary."""
  args = _parse()
  args.out.mkdir(parents=True, exist_ok=True)
  console = rich.console.Console()
  values: dict[str, float] = {}
  if "bound" in args.parts:
    _bound(console, values)
  if "curves" in args.parts:
    _curves(args.out, values)
  if "tunix" in args.parts:
    _compare("Tunix", _TUNIX_CASES, _tunix(args), args, console, values)
  if "torch" in args.parts:
    cases = _TORCH_CASES
    _compare("transformers", cases, _torch(args), args, console, values)
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
  args = parser.parse_args()
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


def _bound(console: rich.console.Console, values: dict[str, float]) -> None:
  """A decode step over what it cannot take less than."""
  table = rich.table.Table(
    "model",
    "context",
    "step ms",
    "matmuls ms",
    "KV ms",
    "bound ms",
    "times its bound",
    title=f"A decode step of {_SLOTS} slots",
  )
  for name in ("1.1M", "29M"):
    for reading in decode_bound.measure(
      shapes.BY_NAME[name],
      contexts=_BOUND_CONTEXTS,
      num_slots=_SLOTS,
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
    num_slots=_SLOTS,
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
    (left, by_context, "context", f"context, tokens ({_SLOTS} slots)"),
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


# Makes one run of a peer: the lengths that it sampled, and seconds.
_Ask = Callable[[], tuple[list[int], float]]


def _compare(
  title: str,
  cases: Sequence[Case],
  start: Callable[[Case], tuple[peer.Peer, _Ask]],
  args: argparse.Namespace,
  console: rich.console.Console,
  values: dict[str, float],
) -> None:
  """Runs pairs of a peer and ours; the ratio of each pair counts."""
  table = rich.table.Table(
    "case",
    "mean length",
    "ours, tokens/s",
    f"{title}, tokens/s",
    "ours is",
    "least to most",
    title=f"Against {title}",
  )
  for case in cases:
    other, ask = start(case)
    ours = our_generator.OurGenerator(
      shapes.BY_NAME[case.shape],
      num_slots=_SLOTS,
      prompt_tokens=_PROMPT_TOKENS,
      limit=case.limit,
    )
    if other.num_params != ours.num_params:
      raise RuntimeError(
        f"{title} has {other.num_params} parameters, ours {ours.num_params}."
      )
    rows = []
    # The first pair compiles.
    for pair in range(min(args.pairs, case.num_pairs) + 1):
      lengths, theirs_s = ask()
      ours_s = ours.generate(lengths)
      if pair:
        rows.append((sum(lengths), theirs_s, ours_s, len(lengths)))
    other.close()
    ratios = [theirs_s / ours_s for _, theirs_s, ours_s, _ in rows]
    ratio = statistics.median(ratios)
    mean = sum(row[0] for row in rows) / sum(row[3] for row in rows)
    table.add_row(
      case.name,
      f"{mean:.0f} of {case.limit}",
      f"{statistics.median(row[0] / row[2] for row in rows):,.0f}",
      f"{statistics.median(row[0] / row[1] for row in rows):,.0f}",
      f"{ratio:.2f}x",
      f"{min(ratios):.2f} to {max(ratios):.2f}",
    )
    key = f"{title}/{case.name}"
    values[f"ratio/{key}"] = ratio
    values[f"ratio_min/{key}"] = min(ratios)
    values[f"ratio_max/{key}"] = max(ratios)
  console.print(table)


def _tunix(
  args: argparse.Namespace,
) -> Callable[[Case], tuple[peer.Peer, _Ask]]:
  """Tunix chooses the lengths, for it can only be given stop tokens."""

  def start(case: Case) -> tuple[peer.Peer, _Ask]:
    shape = dataclasses.asdict(shapes.BY_NAME[case.shape])
    # As likely as it takes for a mean of a fifth of the limit.
    num_stop_ids = shape["vocab_size"] // 50 if case.stops_early else 0
    other = peer.Peer(
      "tunix_sampler.py",
      python=args.tunix_python,
      flags={
        "shape": shape,
        "prompt_tokens": _PROMPT_TOKENS,
        "limit": case.limit,
        "num_stop_ids": num_stop_ids,
      },
      log=args.out / f"tunix_{case.shape}_{case.stops_early}.log",
    )

    def ask() -> tuple[list[int], float]:
      lengths: list[int] = []
      seconds = 0.0
      for _ in range(case.num_batches):
        answer = other.ask(rows=_SLOTS)
        # It does not return the stop token, which it has sampled.
        lengths += [min(n + 1, case.limit) for n in answer["lengths"]]
        seconds += answer["seconds"]
      return lengths, seconds

    return other, ask

  return start


def _torch(
  args: argparse.Namespace,
) -> Callable[[Case], tuple[peer.Peer, _Ask]]:
  """Of transformers' generate each row ends at a length that we choose."""

  def start(case: Case) -> tuple[peer.Peer, _Ask]:
    other = peer.Peer(
      "torch_generate.py",
      python=args.torch_python,
      flags={
        "shape": dataclasses.asdict(shapes.BY_NAME[case.shape]),
        "prompt_tokens": _PROMPT_TOKENS,
      },
      log=args.out / f"torch_{case.shape}_{case.stops_early}.log",
    )
    rng = np.random.default_rng(0)

    def ask() -> tuple[list[int], float]:
      lengths: list[int] = []
      seconds = 0.0
      for _ in range(case.num_batches):
        batch = [case.limit] * _SLOTS
        if case.stops_early:
          drawn = rng.geometric(5 / case.limit, _SLOTS)
          batch = [min(int(n), case.limit) for n in drawn]
        seconds += other.ask(lengths=batch)["seconds"]
        lengths += batch
      return lengths, seconds

    return other, ask

  return start


if __name__ == "__main__":
  main()
