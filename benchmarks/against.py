"""Our generator against peers' samplers: the same lengths, in pairs of runs."""

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import rich.console
import rich.table

from benchmarks import our_generator, peer, shapes

SLOTS = 32
# One for each core of the smallest machine that this is measured on.
MOST_GENERATORS = 2
_PROMPT_TOKENS = 32


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
    group_sizes: completions that share a prompt, as ours knows; a peer
      prefills each on its own.
    num_generators: of ours, that share the slots.
  """

  name: str
  shape: str
  limit: int
  stops_early: bool
  num_batches: int
  num_pairs: int = 100
  group_sizes: tuple[int, ...] = (1,)
  num_generators: tuple[int, ...] = (1, MOST_GENERATORS)


TUNIX_CASES = (
  Case(
    name="1.1M, early stops",
    shape="1.1M",
    limit=256,
    stops_early=True,
    # A real rollout has no end: so many that the last ones count for little.
    num_batches=32,
    num_pairs=3,
    group_sizes=(1, 8),
  ),
  Case(
    name="1.1M, none",
    shape="1.1M",
    limit=256,
    stops_early=False,
    num_batches=2,
  ),
  Case(
    name="29M, early stops",
    shape="29M",
    limit=256,
    stops_early=True,
    num_batches=4,
    num_pairs=2,
    group_sizes=(1, 8),
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
TORCH_CASES = (
  Case(
    name="135M, early stops",
    shape="135M",
    limit=256,
    stops_early=True,
    num_batches=2,
    num_pairs=3,
    group_sizes=(1, 8),
    num_generators=(1,),
  ),
  Case(
    name="135M, none",
    shape="135M",
    limit=256,
    stops_early=False,
    num_batches=1,
    num_pairs=3,
    num_generators=(1,),
  ),
)


# Makes one run of a peer, of so many batches: what lengths, and seconds.
_Ask = Callable[[int], tuple[list[int], float]]


class _Way(NamedTuple):
  """How ours does the work of a case; see there."""

  num_generators: int
  group_size: int

  @property
  def label(self) -> str:
    """What distinguishes it from the simplest way, to follow a name."""
    label = ""
    if self.group_size > 1:
      label += f", groups of {self.group_size}"
    if self.num_generators > 1:
      label += f", {self.num_generators} generators"
    return label


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pair:
  """A run of a peer, and ours of the same lengths."""

  lengths: list[int]
  theirs_s: float
  ours_s: float


def compare(
  title: str,
  cases: Sequence[Case],
  start: Callable[[Case], tuple[peer.Peer, _Ask]],
  args: argparse.Namespace,
  console: rich.console.Console,
  values: dict[str, float],
) -> None:
  """Runs pairs of a peer and ours; the ratio of each pair counts.

  Args:
    title: of the peer.
    cases: those of args.shapes are run.
    start: starts the peer for a case; returns it, and what has it run.
    args: of the command.
    console: for the table.
    values: gets those of the summary.
  """
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
    if case.shape not in args.shapes:
      continue
    pairs = _run_pairs(title, case, start, most_pairs=args.pairs)
    for way, of_way in pairs.items():
      _report(title, case.name + way.label, case.limit, of_way, table, values)
  console.print(table)


def _run_pairs(
  title: str,
  case: Case,
  start: Callable[[Case], tuple[peer.Peer, _Ask]],
  *,
  most_pairs: int,
) -> dict[_Way, list[_Pair]]:
  """Runs the pairs of a case, of each way that ours takes."""
  other, ask = start(case)
  ours = {
    number: our_generator.OurGenerators(
      shapes.BY_NAME[case.shape],
      num_generators=number,
      num_slots=SLOTS,
      prompt_tokens=_PROMPT_TOKENS,
      limit=case.limit,
    )
    for number in case.num_generators
  }
  num_params = next(iter(ours.values())).num_params
  if other.num_params != num_params:
    raise RuntimeError(
      f"{title} has {other.num_params} parameters, ours {num_params}."
    )
  pairs: dict[_Way, list[_Pair]] = {
    _Way(number, size): [] for number in ours for size in case.group_sizes
  }
  # Compiles, and so goes first.
  lengths, _ = ask(1)
  for way in pairs:
    ours[way.num_generators].generate(lengths, group_size=way.group_size)
  for _ in range(min(most_pairs, case.num_pairs)):
    lengths, theirs_s = ask(case.num_batches)
    for way, of_way in pairs.items():
      ours_s = ours[way.num_generators].generate(
        lengths, group_size=way.group_size
      )
      of_way.append(_Pair(lengths=lengths, theirs_s=theirs_s, ours_s=ours_s))
  other.close()
  return pairs


def _report(
  title: str,
  name: str,
  limit: int,
  pairs: Sequence[_Pair],
  table: rich.table.Table,
  values: dict[str, float],
) -> None:
  """Adds a row of the table, and its values."""
  ratios = [pair.theirs_s / pair.ours_s for pair in pairs]
  tokens = [sum(pair.lengths) for pair in pairs]
  mean = sum(tokens) / sum(len(pair.lengths) for pair in pairs)
  speed = lambda seconds: statistics.median(
    count / each for count, each in zip(tokens, seconds, strict=True)
  )
  table.add_row(
    name,
    f"{mean:.0f} of {limit}",
    f"{speed([pair.ours_s for pair in pairs]):,.0f}",
    f"{speed([pair.theirs_s for pair in pairs]):,.0f}",
    f"{statistics.median(ratios):.2f}x",
    f"{min(ratios):.2f} to {max(ratios):.2f}",
  )
  key = f"{title}/{name}"
  values[f"ratio/{key}"] = statistics.median(ratios)
  values[f"ratio_min/{key}"] = min(ratios)
  values[f"ratio_max/{key}"] = max(ratios)


def tunix(
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

    def ask(num_batches: int) -> tuple[list[int], float]:
      lengths: list[int] = []
      seconds = 0.0
      for _ in range(num_batches):
        answer = other.ask(rows=SLOTS)
        # It does not return the stop token, which it has sampled.
        lengths += [min(n + 1, case.limit) for n in answer["lengths"]]
        seconds += answer["seconds"]
      return lengths, seconds

    return other, ask

  return start


def torch(
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

    def ask(num_batches: int) -> tuple[list[int], float]:
      lengths: list[int] = []
      seconds = 0.0
      for _ in range(num_batches):
        batch = [case.limit] * SLOTS
        if case.stops_early:
          drawn = rng.geometric(5 / case.limit, SLOTS)
          batch = [min(int(n), case.limit) for n in drawn]
        seconds += other.ask(lengths=batch)["seconds"]
        lengths += batch
      return lengths, seconds

    return other, ask

  return start
