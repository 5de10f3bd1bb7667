"""Draws who did what and when: trainer and generators, coloured by version."""

import dataclasses
import pathlib
from collections.abc import Sequence

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import axes as mpl_axes
from matplotlib import pyplot as plt

from benchmarks import readings

# Ten colours that neighbours differ in; version 10 is painted like version 0.
_COLOURS = mpl.colormaps["tab10"].colors  # pyright: ignore
_ROW_INCHES = 0.32
_WIDTH_INCHES = 11.0
# Bars narrower than this share of the picture bear no number.
_LABEL_SHARE = 0.015
# Slices of one version with less than this share between them are one bar.
_GAP_SHARE = 0.003


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
  """One schedule's row of the figure.

  Attributes:
    title: above it.
    timeline: of one run.
    start_s: where it begins, in seconds of the run's clock.
  """

  title: str
  timeline: readings.Timeline
  start_s: float


def draw(
  pictures: Sequence[Picture], path: pathlib.Path, *, seconds: float
) -> None:
  """Writes a PNG with the pictures one below the other, on one time scale.

  The trainer's bar of a step has the colour of the version it trains from, a
  generator's that of the version it serves. White is idle.

  Args:
    pictures: at least one.
    path: of the PNG.
    seconds: shown of each, from its start on.
  """
  rows = [1 + len(picture.timeline.generators) for picture in pictures]
  height = sum(_ROW_INCHES * count + 0.75 for count in rows)
  figure, grid = plt.subplots(
    len(pictures),
    1,
    figsize=(_WIDTH_INCHES, height),
    squeeze=False,
    sharex=True,
    gridspec_kw={"height_ratios": rows},
    layout="constrained",
  )
  for picture, ax in zip(pictures, grid[:, 0], strict=True):
    _draw_one(ax, picture, seconds)
  grid[-1, 0].set_xlabel(
    "seconds; colours and numbers are policy versions, white is idle"
  )
  figure.savefig(path, dpi=130)
  plt.close(figure)


def _draw_one(ax: mpl_axes.Axes, picture: Picture, seconds: float) -> None:
  timeline, start_s = picture.timeline, picture.start_s
  tracks = [
    ("trainer", timeline.trainer),
    *(
      (f"generator {generator_id}", _joined(slices, gap_s=_GAP_SHARE * seconds))
      for generator_id, slices in sorted(timeline.generators.items())
    ),
  ]
  for row, (_, slices) in enumerate(tracks):
    for left, right, version in slices:
      _draw_bar(ax, row, left - start_s, right - start_s, version, seconds)
  ax.set_yticks(range(len(tracks)), [name for name, _ in tracks], fontsize=8)
  ax.set_ylim(len(tracks) - 0.5, -0.5)
  ax.set_xlim(0, seconds)
  ax.set_title(picture.title, fontsize=10, loc="left")
  ax.spines[["top", "right"]].set_visible(False)


def _draw_bar(
  ax: mpl_axes.Axes,
  row: int,
  left: float,
  right: float,
  version: int,
  seconds: float,
) -> None:
  left, right = max(left, 0.0), min(right, seconds)
  if right <= left:
    return
  colour = _COLOURS[version % len(_COLOURS)]
  ax.barh(row, right - left, left=left, height=0.8, color=colour, linewidth=0)
  if right - left > _LABEL_SHARE * seconds:
    ax.text(
      (left + right) / 2,
      row,
      str(version),
      ha="center",
      va="center",
      fontsize=8,
      color="white",
    )


def _joined(
  slices: Sequence[tuple[float, float, int]], *, gap_s: float
) -> list[tuple[float, float, int]]:
  """Joins slices of one version that follow each other within the gap."""
  joined: list[tuple[float, float, int]] = []
  for left, right, version in sorted(slices):
    if joined and joined[-1][2] == version and left - joined[-1][1] < gap_s:
      left, before, _ = joined.pop()[0], right, version
      joined.append((left, before, version))
    else:
      joined.append((left, right, version))
  return joined
