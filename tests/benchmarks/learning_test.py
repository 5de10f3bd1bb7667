"""Means and standard errors over seeds, by hand."""

import numpy as np

from benchmarks import learning


def _run(max_staleness, seed, accuracy):
  return learning.Run(
    max_staleness=max_staleness,
    seed=seed,
    curve={0: 0.1, 20: accuracy},
    values={"lag_mean": max_staleness / 2, "seconds": 30.0},
  )


def test_folded_over_seeds_by_hand(tmp_path):
  runs = [
    _run(0, 0, 0.5), _run(0, 1, 0.7), _run(3, 0, 0.5), _run(3, 1, 0.6),
  ]  # fmt: skip
  found = learning.fold(runs)
  # Deviations sqrt(0.02) and sqrt(0.005), over sqrt(2).
  expected = {
    "accuracy/0": 0.6,
    "stderr/0": 0.1,
    "accuracy/3": 0.55,
    "stderr/3": 0.05,
    "lag_mean/3": 1.5,
    "gap/3": -0.05,
    "gap_stderrs/3": -0.05 / np.sqrt(0.0125),
  }
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)
  assert "gap/0" not in found
  learning.draw(runs, tmp_path / "learning.png")
  assert (tmp_path / "learning.png").stat().st_size > 10_000
  assert "stderr/0" not in learning.fold(runs[:1])
