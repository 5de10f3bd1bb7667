"""Draws a sweep: throughput versus lag, and why generators and trainer idle."""

import pathlib
from collections.abc import Mapping, Sequence

from dora_jax.simulator import outcome

_WIDTH_INCHES = 11.0


def draw(
  names: Sequence[str],
  results: Sequence[Mapping[str, float]],
  path: pathlib.Path,
  *,
  best: int | None,
) -> None:
  """Writes a PNG.

  Raises:
    RuntimeError: matplotlib is not installed.
  """
  try:
    import matplotlib as mpl
  except ImportError as error:
    raise RuntimeError(
      "A picture needs matplotlib: pip install 'dora_jax[bench]', or leave "
      "--workdir away to see the table alone."
    ) from error
  mpl.use("Agg")
  from matplotlib import pyplot as plt

  figure, (left, right) = plt.subplots(
    1,
    2,
    figsize=(_WIDTH_INCHES, max(4.0, 1.2 + 0.26 * len(names))),
    layout="constrained",
  )
  for index, (name, values) in enumerate(zip(names, results, strict=True)):
    is_best = index == best
    point = values["lag_mean"], values["tokens_per_s"]
    left.plot(*point, "*" if is_best else "o", ms=13 if is_best else 6)
    left.annotate(
      name, point, xytext=(5, 3), textcoords="offset points", fontsize=7
    )
  left.set_xlabel("mean lag, versions")
  left.set_ylabel("tokens/s")
  rows = range(len(names))
  reached = [0.0] * len(names)
  for cause in outcome.CAUSES:
    shares = [100 * values[f"idle/{cause}"] for values in results]
    if max(shares) >= 0.5:
      right.barh(rows, shares, left=reached, label=f"generators: {cause}")
      reached = [a + b for a, b in zip(reached, shares, strict=True)]
  waits = [
    100 * values["rollout_not_hidden_s"] / values["step_s"]
    for values in results
  ]
  right.plot(waits, rows, "kx", label="trainer")
  right.set_yticks(rows, names, fontsize=7)
  right.invert_yaxis()
  right.set_xlabel("% of the time idle, by cause")
  right.legend(fontsize=7)
  figure.savefig(path, dpi=130)
  plt.close(figure)
