"""Shows the values of benchmarks.schedules to a reader."""

import itertools
from collections.abc import Mapping, Sequence

import rich.table

# Summary key -> (column, format). README.md says what they mean.
_SPEED = {
  "tokens_per_s": ("tokens/s", "{:,.0f}"),
  "step_s": ("step s", "{:.2f}"),
  "train_s": ("train s", "{:.2f}"),
  "wait_data_s": ("wait data s", "{:.2f}"),
  "wait_straggler_s": ("wait straggler s", "{:.2f}"),
  "bubble_share": ("bubble", "{:.0%}"),
  "generator_idle_share": ("idle", "{:.0%}"),
}
_PRICE = {
  "lag_mean": ("lag", "{:.2f}"),
  "lag_max": ("lag, most", "{:.0f}"),
  "versions_max": ("alive, most", "{:.0f}"),
  "moved": ("moved", "{:,.0f}"),
  "moved_tokens": ("KV moved", "{:,.0f}"),
  "mixed": ("mixed", "{:,.0f}"),
  "dropped": ("dropped", "{:,.0f}"),
  "reprefilled": ("re-prefilled", "{:,.0f}"),
}

# Who bounds the step -> how a sentence about it begins.
_BOUNDS = {
  "trainer_bound": "Where training is what takes longest",
  "rollout_bound": "Where rollout is what takes longest",
}


def speed(
  names: Sequence[str], values: Mapping[str, float]
) -> rich.table.Table:
  """How fast each schedule is, where its time goes, and dora against it."""
  ratios = {}
  for dora, name in itertools.product(names, names):
    if f"ratio/{dora}_over_{name}" in values:
      middle, least, most = (
        values[f"{key}/{dora}_over_{name}"]
        for key in ("ratio", "ratio_min", "ratio_max")
      )
      ratios[name] = f"{middle:.2f}x"
      if least < most:
        ratios[name] += f" ({least:.2f} to {most:.2f})"
  table = _table("How fast", _SPEED, last_column="dora is")
  for name in names:
    table.add_row(name, *_cells(name, values, _SPEED), ratios.get(name, ""))
  return table


def price(
  names: Sequence[str], values: Mapping[str, float]
) -> rich.table.Table:
  """What each schedule pays for it: versions, moves, and broken promises."""
  table = _table("At which price", _PRICE)
  for name in names:
    table.add_row(name, *_cells(name, values, _PRICE))
  return table


def sentences(values: Mapping[str, float]) -> list[str]:
  """What the work was like, in words."""
  lines = [
    f"Completions: median {values['length_median']:.0f}, mean "
    f"{values['length_mean']:.1f}, max {values['length_max']:.0f} tokens."
  ]
  if "tail_s" in values:
    lines.append(
      f"A synchronous rollout takes {values['tail_s']:.2f} s, "
      f"{1e3 * values['decode_step_s']:.2f} ms a decode step of its longest "
      "completion."
    )
  if "tail_over_step" in values:
    lines.append(
      f"Tail / step of dora: {values['tail_over_step']:.2f} (below 1 there is "
      "little to gain)."
    )
  for bound, claim in _BOUNDS.items():
    if f"lag_auto_over_fixed/{bound}" in values:
      lag = values[f"lag_auto_over_fixed/{bound}"]
      speed_share = values[f"speed_auto_over_fixed/{bound}"]
      lines.append(
        f"{claim}, dora that finds RBS itself has {lag:.2f} of the mean lag of "
        f"RBS fixed at the cap, and {speed_share:.2f} of its tokens/s."
      )
  return lines


def _table(
  title: str,
  columns: Mapping[str, tuple[str, str]],
  last_column: str | None = None,
) -> rich.table.Table:
  table = rich.table.Table(title=title, title_justify="left")
  table.add_column("schedule", no_wrap=True)
  for label, _ in columns.values():
    table.add_column(label, justify="right")
  if last_column is not None:
    table.add_column(last_column, justify="right", no_wrap=True)
  return table


def _cells(
  name: str,
  values: Mapping[str, float],
  columns: Mapping[str, tuple[str, str]],
) -> list[str]:
  return [
    form.format(values[f"{key}/{name}"]) for key, (_, form) in columns.items()
  ]
