"""The thread of a generator mesh: its generators take turns on it."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

from dora_jax import interfaces, trace, types
from dora_jax.generator import worker as worker_lib
from dora_jax.runtime import canary as canary_lib
from dora_jax.runtime import part
from dora_jax.weights import store as store_lib

# Slices of the timeline join chunks of one version that follow each other
# closer than the gap, up to this length.
_SLICE_S = 0.25
_GAP_S = 0.005


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOrder:
  """Serve this version."""

  generator_id: int
  version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnloadOrder:
  """Let go of whatever it serves."""

  generator_id: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubmitOrder:
  """Generate these requests."""

  generator_id: int
  requests: Sequence[types.Request]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
  """A generator returns finished trajectories."""

  generator_id: int
  trajectories: Sequence[types.Trajectory]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
  """A generator serves a version, checked by checksum and canary."""

  generator_id: int
  version: int


class GeneratorPart(part.Part):
  """Drives the generators of one mesh, which take turns on it.

  Attributes:
    busy_s: seconds in which at least one of them had a request.
  """

  def __init__(
    self,
    *,
    post: part.Post,
    mesh_id: int,
    worker: worker_lib.MeshWorker,
    names: Mapping[int, str],
    store: store_lib.WeightStore,
    canary: canary_lib.Canary,
    timeline: trace.Trace,
  ):
    super().__init__(name=f"generator mesh {mesh_id}", post=post)
    self.busy_s = 0.0
    self.worker = worker
    self._names = names
    self._lanes = {lane.generator_id: lane for lane in worker.lanes}
    self._store = store
    self._canary = canary
    self._trace = timeline
    self._tracks = {
      generator_id: timeline.track(names[generator_id], "generators")
      for generator_id in self._lanes
    }
    self._publish_track = timeline.track(f"to mesh {mesh_id}", "weights")
    # generator -> (version, start, end, trajectories) of its open slice.
    self._slices: dict[int, tuple[int, float, float, int]] = {}

  def work(self) -> None:
    """Carries out orders, and decodes while any request is live."""
    while True:
      is_idle = not any(lane.num_live() for lane in self._lanes.values())
      if is_idle:
        self._close_slices()
        self.begin("waiting for requests")
      for order in self.take(block=is_idle):
        if order is None:
          return
        self._carry_out(order)
      if any(lane.num_live() for lane in self._lanes.values()):
        self._decode()

  def _carry_out(self, order: LoadOrder | UnloadOrder | SubmitOrder) -> None:
    lane = self._lanes[order.generator_id]
    match order:
      case SubmitOrder():
        lane.submit(order.requests)
      case UnloadOrder():
        self._unload(lane)
      case LoadOrder():
        self._load(lane, order.version)

  def _unload(self, lane: interfaces.Generator) -> None:
    """Lets go of a version before the next comes, so that both never meet."""
    version = lane.version
    if version is not None:
      lane.unload()
      self._store.release(version, holder=self._names[lane.generator_id])

  def _load(self, lane: interfaces.Generator, version: int) -> None:
    name = self._names[lane.generator_id]
    self.begin(f"loading version {version} into {name}")
    start_s = time.perf_counter()
    self._unload(lane)
    lane.load(version, self._store.place(version, holder=name))
    logprobs = lane.score(self._canary.tokens)
    self._canary.check(version, logprobs, who=name)
    self._trace.span(
      self._publish_track, f"v{version}", start_s, time.perf_counter(), to=name
    )
    self._post(Served(generator_id=lane.generator_id, version=version))

  def _decode(self) -> None:
    if self.doing != "decoding":
      self.begin("decoding")
    versions = {
      lane.generator_id: lane.version
      for lane in self._lanes.values()
      if lane.num_live()
    }
    start_s = time.perf_counter()
    finished = self.worker.step()
    end_s = time.perf_counter()
    self.busy_s += end_s - start_s
    for generator_id, trajectories in finished:
      version = versions[generator_id]
      assert version is not None, "requests are live, so a version is loaded"
      self._note(generator_id, version, start_s, end_s, len(trajectories))
      if trajectories:
        self._post(
          Sampled(generator_id=generator_id, trajectories=trajectories)
        )

  def _note(
    self,
    generator_id: int,
    version: int,
    start_s: float,
    end_s: float,
    num_finished: int,
  ) -> None:
    """Adds a step to the generator's slice of the timeline."""
    if generator_id in self._slices:
      before, since_s, until_s, count = self._slices[generator_id]
      if (
        before == version
        and end_s - since_s < _SLICE_S
        and start_s - until_s < _GAP_S
      ):
        self._slices[generator_id] = (
          version,
          since_s,
          end_s,
          count + num_finished,
        )
        return
      self._close_slice(generator_id)
    self._slices[generator_id] = (version, start_s, end_s, num_finished)

  def _close_slices(self) -> None:
    for generator_id in list(self._slices):
      self._close_slice(generator_id)

  def _close_slice(self, generator_id: int) -> None:
    version, start_s, end_s, count = self._slices.pop(generator_id)
    self._trace.span(
      self._tracks[generator_id],
      f"v{version}",
      start_s,
      end_s,
      finished=count,
    )
