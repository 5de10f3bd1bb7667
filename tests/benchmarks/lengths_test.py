"""Lengths depend on a request's name alone, and have the tail that we claim."""

import numpy as np

from benchmarks import lengths

_SHAPE = {"median": 24.0, "sigma": 1.2, "limit": 512}


def _draw(names, *, seed=0):
  return [
    lengths.completion_length(g, m, seed=seed, **_SHAPE) for g, m in names
  ]


def test_a_length_depends_on_seed_group_and_member_only():
  names = [(group, member) for group in range(16) for member in range(8)]
  drawn = dict(zip(names, _draw(names), strict=True))
  # Neither order nor company matters, and no two coordinates are mixed up.
  backward = names[::-1]
  assert _draw(backward) == [drawn[name] for name in backward]
  assert _draw([(3, 5), (5, 3)]) == [drawn[3, 5], drawn[5, 3]]
  assert drawn[3, 5] != drawn[5, 3]
  assert _draw(names, seed=1) != list(drawn.values())


def test_lengths_are_clipped_and_have_the_promised_tail():
  drawn = np.array(_draw((g, m) for g in range(500) for m in range(8)))
  assert drawn.min() >= 1 and drawn.max() == 512
  assert 22 <= np.median(drawn) <= 26
  assert 0.08 <= drawn.mean() / 512 <= 0.1
  assert np.quantile(drawn, 0.99) > 10 * np.median(drawn)
  # What one batch of 128 waits for: on average above half of the limit.
  assert drawn[:3968].reshape(-1, 128).max(axis=1).mean() > 256
