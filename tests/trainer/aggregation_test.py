"""Denominators against numbers worked out by hand."""

import numpy as np
import pytest

from dora_jax.trainer import aggregation, packing


@pytest.mark.parametrize(
  "kind, expected",
  [("token_mean", 6.0), ("sequence_mean", 3.0), ("constant", 30.0)],
)
@pytest.mark.parametrize("rows_per_batch", [1, 3])
def test_denominators_count_the_whole_step(kind, expected, rows_per_batch):
  pairs = [(np.array([1, 2]), np.array([3] * length)) for length in (1, 2, 3)]
  batches = packing.pack_examples(
    pairs, row_length=7, rows_per_batch=rows_per_batch
  )
  assert len(batches) == (2 if rows_per_batch == 1 else 1)
  found = aggregation.denominator(kind, batches, constant_length=10)
  assert found == expected
