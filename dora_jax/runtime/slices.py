"""Slices of the timeline: what a generator decoded, chunk joined to chunk."""

from collections.abc import Mapping

from dora_jax import trace

# Slices join chunks of one version that follow each other closer than the gap,
# up to this length.
_SLICE_S = 0.25
_GAP_S = 0.005


class Slices:
  """Draws what the generators of a mesh do, each on its track."""

  def __init__(self, timeline: trace.Trace, tracks: Mapping[int, int]):
    self._trace = timeline
    self._tracks = tracks
    # generator -> (version, start, end, trajectories) of its open slice.
    self._open: dict[int, tuple[int, float, float, int]] = {}

  def add(
    self,
    generator_id: int,
    version: int,
    start_s: float,
    end_s: float,
    num_finished: int,
  ) -> None:
    """Adds a chunk to the generator's slice, or begins one with it."""
    if generator_id in self._open:
      before, since_s, until_s, count = self._open[generator_id]
      if (
        before == version
        and end_s - since_s < _SLICE_S
        and start_s - until_s < _GAP_S
      ):
        num_finished += count
        self._open[generator_id] = (version, since_s, end_s, num_finished)
        return
      self._close(generator_id)
    self._open[generator_id] = (version, start_s, end_s, num_finished)

  def close(self) -> None:
    """Draws the slices that are open."""
    for generator_id in list(self._open):
      self._close(generator_id)

  def _close(self, generator_id: int) -> None:
    version, start_s, end_s, count = self._open.pop(generator_id)
    self._trace.span(
      self._tracks[generator_id],
      f"v{version}",
      start_s,
      end_s,
      finished=count,
    )
