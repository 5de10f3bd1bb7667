"""Throws inputs at a boundary: each gives a result, or an error that names it.

Few by default; `pytest -m slow tests/fuzz -s` tries 100,000 and prints how they
ended.
"""

import collections
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

# Of speed and size, which say nothing on a busy machine.
_CHECKS = [
  hypothesis.HealthCheck.too_slow,
  hypothesis.HealthCheck.data_too_large,
  hypothesis.HealthCheck.filter_too_much,
  hypothesis.HealthCheck.large_base_example,
]


def amounts(*, few: int, many: int) -> pytest.MarkDecorator:
  """Runs a test with few inputs by default, and with many where it is slow."""
  return pytest.mark.parametrize(
    "amount",
    [
      pytest.param(few, id="few"),
      pytest.param(many, id="many", marks=pytest.mark.slow),
    ],
  )


def run(
  area: str,
  inputs: st.SearchStrategy[Any],
  attempt: Callable[[Any], str],
  amount: int,
) -> collections.Counter[str]:
  """Tries inputs, always the same ones; prints and returns how they ended.

  Args:
    area: what is tried, for what is printed.
    inputs: the strategy.
    attempt: uses one input; returns how it ended, in a word. Whatever it raises
      is a failure.
    amount: number of inputs.
  """
  ended = collections.Counter[str]()

  @hypothesis.settings(
    max_examples=amount,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=_CHECKS,
  )
  @hypothesis.given(inputs)
  def each(value: Any) -> None:
    ended[attempt(value)] += 1

  each()
  counts = ", ".join(f"{n} {how}" for how, n in sorted(ended.items()))
  print(f"\nfuzz {area}: {ended.total()} inputs: {counts}")
  return ended
