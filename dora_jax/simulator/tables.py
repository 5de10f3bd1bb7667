"""Shows simulated runs to a reader."""

from collections.abc import Mapping, Sequence

import rich.table

from dora_jax.simulator import outcome

# Measure -> (column, factor, format).
_COLUMNS = {
  "tokens_per_s": ("tokens/s", 1.0, "{:,.0f}"),
  "step_s": ("step s", 1.0, "{:,.1f}"),
  "train_s": ("train s", 1.0, "{:,.1f}"),
  "wait_data_s": ("wait data s", 1.0, "{:,.1f}"),
  "wait_straggler_s": ("straggler s", 1.0, "{:,.1f}"),
  "lag_mean": ("lag", 1.0, "{:.2f}"),
  "bubble_share": ("bubble", 100.0, "{:.0f}%"),
  **{
    f"idle/{cause}": (f"idle: {cause}", 100.0, "{:.0f}%")
    for cause in outcome.CAUSES
  },
  "moved": ("moved", 1.0, "{:,.0f}"),
  "reprefilled": ("re-prefilled", 1.0, "{:,.0f}"),
  "dropped": ("dropped", 1.0, "{:,.0f}"),
}
# What no run shows more than a trace of is left out.
_OPTIONAL = ("idle/", "moved", "reprefilled", "dropped")
_LAG = "lag_mean"
_PUBLISHED = {
  "step_s": ("step, minutes", 1 / 60, "{:.2f}"),
  "rollout_not_hidden_s": ("rollout not hidden, minutes", 1 / 60, "{:.2f}"),
  "tokens_per_s": ("tokens/s", 1.0, "{:,.0f}"),
  _LAG: ("mean lag", 1.0, "{:.2f}"),
}


def runs(
  names: Sequence[str],
  results: Sequence[Mapping[str, float]],
  *,
  best: int | None,
) -> rich.table.Table:
  """One line a run; the best one in bold."""
  table = rich.table.Table(
    title="Counts are of one step; idle: share of the generators' time",
    title_justify="left",
  )
  table.add_column("setting")
  shown = [
    measure
    for measure, (_, factor, form) in _COLUMNS.items()
    if not measure.startswith(_OPTIONAL)
    or any(
      form.format(factor * values[measure]).strip("%") != "0"
      for values in results
    )
  ]
  for measure in shown:
    table.add_column(_COLUMNS[measure][0], justify="right")
  for index, (name, values) in enumerate(zip(names, results, strict=True)):
    cells = []
    for measure in shown:
      _, factor, form = _COLUMNS[measure]
      cells.append(form.format(factor * values[measure]))
    table.add_row(name, *cells, style="bold" if index == best else None)
  return table


def against_published(
  names: Sequence[str],
  results: Sequence[Mapping[str, float]],
  published: Mapping[str, Mapping[str, float]],
) -> rich.table.Table:
  """Predicted, published and error, of each measure that is published."""
  table = rich.table.Table(
    title="Predicted, published, error", title_justify="left"
  )
  table.add_column("setting")
  shown = [
    measure
    for measure in _PUBLISHED
    if any(measure in found for found in published.values())
  ]
  for measure in shown:
    table.add_column(_PUBLISHED[measure][0], justify="right")
  for name, values in zip(names, results, strict=True):
    cells = []
    for measure in shown:
      _, factor, form = _PUBLISHED[measure]
      predicted = form.format(factor * values[measure])
      found = published.get(name, {}).get(measure)
      if found is None:
        cells.append(f"{predicted}      –     –")
        continue
      off = error(measure, values[measure], found)
      off_text = f"{off:+.2f}" if measure == _LAG else f"{off:+.0%}"
      cells.append(f"{predicted}  {form.format(factor * found)}  {off_text}")
    table.add_row(name, *cells)
  return table


def error(measure: str, predicted: float, published: float) -> float:
  """By how much a prediction is off: of what is published, lag in versions."""
  if measure == _LAG:
    return predicted - published
  return predicted / published - 1.0
