"""Measures the train step: against matmuls alone, and against Tunix's.

  python -m benchmarks.train --out=DIR [--tunix_python=PATH] [--pairs=3] \
    [--shapes=1.1M,29M]

Useful work is what the tokens of the sequences need, padding left out and
nothing counted twice that is computed again:

  FLOPs = 6 * (params of matmuls) * tokens
          + 12 * layers * heads * head width * sum of t over all tokens,

t a token's place in its own sequence, counted from 1: what it attends to. Each
round runs matmuls of 2048 x 2048 x 2048, our step and the peer's in turn, on
the same tokens; rounds go on until each has run `--pairs` times, warm.
"""

import argparse
import dataclasses
import pathlib
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from benchmarks import our_trainer, peer, shapes
from dora_jax.model import transformer
from dora_jax.runtime import summary

_ROW_LENGTH = 512
_PROMPT_TOKENS = 64
_LIMIT = _ROW_LENGTH - _PROMPT_TOKENS
_GROUP_SIZE = 4
_MATMUL_SIZE = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """What both sides train on.

  Attributes:
    key: of the case, in the summary.
    shape: of the model, in shapes.BY_NAME.
    num_sequences: of a step.
    rows_per_batch: rows of our micro-batches.
    stops_early: whether completions end at about a fifth of the limit.
    is_packed: whether the peer packs too, by its own means.
  """

  key: str
  shape: str
  num_sequences: int
  rows_per_batch: int
  stops_early: bool
  is_packed: bool = False


def _cases(shape: str) -> list[Case]:
  """All cases of a model."""
  is_small = shape == "1.1M"
  key = {"1.1M": "1m", "29M": "29m"}[shape]
  case = Case(
    key=key,
    shape=shape,
    num_sequences=32 if is_small else 8,
    # The sequences of the larger model fill two rows.
    rows_per_batch=4 if is_small else 2,
    stops_early=True,
  )
  return [
    case,
    dataclasses.replace(case, key=f"{key}_packed", is_packed=True),
    dataclasses.replace(
      case,
      key=f"{key}_no_padding",
      stops_early=False,
      rows_per_batch=8 if is_small else 4,
    ),
  ]


def main() -> None:
  """Runs all cases; writes a table and a summary."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--tunix_python", help="of an environment with Tunix")
  parser.add_argument("--pairs", type=int, default=3)
  parser.add_argument("--shapes", default="1.1M,29M")
  args = parser.parse_args()
  args.out.mkdir(parents=True, exist_ok=True)
  table = rich.table.Table(
    "case",
    "tokens",
    "padding",
    "ours, tokens/s",
    "GFLOP/s",
    "of matmuls",
    "Tunix, tokens/s",
    "ours is",
    "by CPU time",
    title="A train step",
  )
  values: dict[str, float] = {}
  console = rich.console.Console(width=160)
  for shape in args.shapes.split(","):
    for case in _cases(shape):
      # Without a peer, a case that differs in its packing alone says nothing.
      if args.tunix_python or not case.is_packed:
        row = _measure(case, args, values)
        console.log(*row, sep=" | ")
        table.add_row(*row)
  console.print(table)
  command = shlex.join(["python", "-m", "benchmarks.train", *sys.argv[1:]])
  summary.write_summary(args.out, values, command=command)


def _measure(
  case: Case, args: argparse.Namespace, values: dict[str, float]
) -> list[str]:
  """Runs the rounds of a case; returns its row of the table."""
  config = shapes.BY_NAME[case.shape]
  prompts, completions = _draw(case, config.vocab_size)
  ours = our_trainer.OurTrainer(
    config, row_length=_ROW_LENGTH, rows_per_batch=case.rows_per_batch
  )
  matmul, other = _matmul(), None
  if args.tunix_python:
    other = _start_tunix(case, prompts, completions, args)
    if other.num_params != ours.num_params:
      raise RuntimeError(
        f"Tunix has {other.num_params} parameters, ours {ours.num_params}."
      )
  rounds = []
  # The first one compiles.
  for _ in range(args.pairs + 1):
    theirs = {}
    if other is not None:
      theirs = other.ask(prompts=prompts, completions=completions)
    before = matmul()
    spent = ours.step(prompts, completions, group_size=_GROUP_SIZE)
    rounds.append((min(before, matmul()), spent, theirs))
  rounds = rounds[1:]
  lengths = [
    len(prompt) + len(completion)
    for prompt, completion in zip(prompts, completions, strict=True)
  ]
  flops, tokens = _count_flops(config, lengths), sum(lengths)
  median = statistics.median
  ours_s = median(spent.seconds for _, spent, _ in rounds)
  # Of each round, for a machine's other users slow both down.
  in_matmul = flops / (2 * _MATMUL_SIZE**3)
  shares = [in_matmul * one.seconds / spent.seconds for one, spent, _ in rounds]
  cpu_shares = [
    in_matmul * one.cpu_seconds / spent.cpu_seconds for one, spent, _ in rounds
  ]
  values |= {
    f"tokens_per_s/{case.key}": tokens / ours_s,
    f"flops_per_s/{case.key}": flops / ours_s,
    f"matmul_share/{case.key}": median(shares),
    f"cpu_matmul_share/{case.key}": median(cpu_shares),
    f"padding_share/{case.key}": rounds[0][1].padding_share,
  }
  row = [
    case.key,
    f"{tokens:,}",
    f"{rounds[0][1].padding_share:.0%}",
    f"{tokens / ours_s:,.0f}",
    f"{flops / ours_s / 1e9:.0f}",
    f"{median(shares):.0%} ({median(cpu_shares):.0%} by CPU time)",
  ]
  if other is None:
    return [*row, "", "", ""]
  other.close()
  ratios = [theirs["seconds"] / spent.seconds for _, spent, theirs in rounds]
  cpu_ratios = [
    theirs["cpu_seconds"] / spent.cpu_seconds for _, spent, theirs in rounds
  ]
  theirs_s = median(theirs["seconds"] for *_, theirs in rounds)
  values |= {
    f"ratio/tunix_{case.key}": median(ratios),
    f"ratio_min/tunix_{case.key}": min(ratios),
    f"ratio_max/tunix_{case.key}": max(ratios),
    f"cpu_ratio/tunix_{case.key}": median(cpu_ratios),
  }
  return [
    *row,
    f"{tokens / theirs_s:,.0f}",
    f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})",
    f"{median(cpu_ratios):.2f}x",
  ]


def _draw(
  case: Case, vocab_size: int
) -> tuple[list[list[int]], list[list[int]]]:
  """Random prompts and completions, the same in every run."""
  rng = np.random.default_rng(0)
  draw = lambda size: rng.integers(2, vocab_size, size).tolist()
  lengths = np.full(case.num_sequences, _LIMIT)
  if case.stops_early:
    lengths = rng.geometric(5 / _LIMIT, case.num_sequences).clip(2, _LIMIT)
  prompts: list[list[int]] = []
  for _ in range(case.num_sequences // _GROUP_SIZE):
    prompts += [draw(_PROMPT_TOKENS)] * _GROUP_SIZE
  return prompts, [draw(int(length)) for length in lengths]


def _count_flops(
  config: transformer.ModelConfig, lengths: Sequence[int]
) -> float:
  """Of a step, as the module's docstring has it."""
  shapes_of = transformer.abstract_params(config, dtype=jnp.float32)
  num_params = sum(
    leaf.size for leaf in jax.tree.leaves(shapes_of) if len(leaf.shape) > 2
  )
  num_params += config.vocab_size * config.width
  attended = sum(length * (length + 1) // 2 for length in lengths)
  width = config.num_heads * config.head_width
  linear = 6 * num_params * sum(lengths)
  return linear + 12 * config.num_layers * width * attended


class _Time(NamedTuple):
  """Of one product of two square matrices."""

  seconds: float
  cpu_seconds: float


def _matmul() -> Callable[[], _Time]:
  """Times products of two square matrices, float32; the quickest counts."""
  multiply = jax.jit(jnp.dot)
  matrix = jax.random.normal(jax.random.key(0), (_MATMUL_SIZE, _MATMUL_SIZE))
  jax.block_until_ready(multiply(matrix, matrix))

  def once() -> _Time:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    jax.block_until_ready(multiply(matrix, matrix))
    return _Time(
      seconds=time.perf_counter() - start_s,
      cpu_seconds=time.process_time() - start_cpu_s,
    )

  return lambda: min(once() for _ in range(3))


def _start_tunix(
  case: Case,
  prompts: Sequence[Sequence[int]],
  completions: Sequence[Sequence[int]],
  args: argparse.Namespace,
) -> peer.Peer:
  """The peer, told how many rows its packing will make."""
  # It fills a row in order, and starts the next where one does not fit.
  num_rows, left = 0, 0
  for prompt, completion in zip(prompts, completions, strict=True):
    length = len(prompt) + len(completion)
    if length > left:
      num_rows, left = num_rows + 1, _ROW_LENGTH
    left -= length
  return peer.Peer(
    "tunix_trainer.py",
    python=args.tunix_python,
    flags={
      "shape": dataclasses.asdict(shapes.BY_NAME[case.shape]),
      "prompt_tokens": _PROMPT_TOKENS,
      "limit": _LIMIT,
      "packed_tokens": _ROW_LENGTH if case.is_packed else 0,
      "num_rows": num_rows,
    },
    log=args.out / f"tunix_{case.key}.log",
  )


if __name__ == "__main__":
  main()
