"""The thread of a generator mesh: its generators take turns on it."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import jax
from absl import logging

from dora_jax import interfaces, trace, types
from dora_jax.generator import worker as worker_lib
from dora_jax.runtime import canary as canary_lib
from dora_jax.runtime import part, slices
from dora_jax.weights import store as store_lib

# How often a generator that decodes says how far it is.
_PROGRESS_S = 0.5

# (group_id, member): what a request is called.
Name = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOrder:
  """Serve this version; with `carries_live`, live requests go on under it."""

  generator_id: int
  version: int
  carries_live: bool = False


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
class ExtractOrder:
  """Pause these requests, and pack them for another generator."""

  generator_id: int
  target_id: int
  requests: Sequence[Name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreOrder:
  """Take over these requests from another generator."""

  generator_id: int
  source_id: int
  parcels: Sequence[interfaces.Parcel]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForgetOrder:
  """Free what these paused requests hold: another generator has them."""

  generator_id: int
  requests: Sequence[Name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeOrder:
  """Go on with these paused requests: no other generator has them."""

  generator_id: int
  requests: Sequence[Name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CancelOrder:
  """Give up these requests."""

  generator_id: int
  requests: Sequence[Name]


Order = (
  LoadOrder
  | UnloadOrder
  | SubmitOrder
  | ExtractOrder
  | RestoreOrder
  | ForgetOrder
  | ResumeOrder
  | CancelOrder
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
  """A generator returns finished trajectories."""

  generator_id: int
  trajectories: Sequence[types.Trajectory]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
  """A generator serves a version, checked by checksum and canary.

  Attributes:
    generator_id: the generator.
    version: the version.
    num_reprefilled: tokens of live requests whose KV was computed anew for it.
  """

  generator_id: int
  version: int
  num_reprefilled: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extracted:
  """Requests are paused and packed; `missing` ones had finished already."""

  source_id: int
  target_id: int
  parcels: Sequence[interfaces.Parcel]
  missing: tuple[Name, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
  """The target has these requests, and the KV of so many of their tokens."""

  source_id: int
  target_id: int
  requests: tuple[Name, ...]
  num_kv_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreFailed:
  """The target has none of these requests: they are to go on at the source."""

  source_id: int
  target_id: int
  requests: tuple[Name, ...]
  error: Exception


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cancelled:
  """Requests were given up.

  Attributes:
    generator_id: the generator.
    cancelled: (group_id, member, sampled tokens) of each.
    missing: those that had finished, or left, already.
  """

  generator_id: int
  cancelled: tuple[tuple[int, int, int], ...]
  missing: tuple[Name, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
  """How far a generator is.

  Attributes:
    generator_id: the generator.
    num_sampled: tokens that it has sampled since it was made.
    num_kv_tokens: positions whose KV its live requests hold.
    num_waiting: live requests that have no slot.
    pages_used: pages of its mesh that are held, by whichever lane.
    num_pages: pages of its mesh.
  """

  generator_id: int
  num_sampled: int
  num_kv_tokens: int
  num_waiting: int
  pages_used: int
  num_pages: int


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
    self._slices = slices.Slices(timeline, self._tracks)
    # generator -> when it last said how far it is, on perf_counter.
    self._said_s = dict.fromkeys(self._lanes, -_PROGRESS_S)

  def work(self) -> None:
    """Carries out orders, and decodes while any request can be decoded."""
    while True:
      is_idle = not self.worker.can_advance()
      if is_idle:
        self._slices.close()
        is_moving = any(lane.num_live() for lane in self._lanes.values())
        self.begin(
          "waiting for a move to end" if is_moving else "waiting for requests"
        )
      for order in self.take(block=is_idle):
        if order is None:
          return
        self._carry_out(order)
      if self.worker.can_advance():
        self._decode()

  def _carry_out(self, order: Order) -> None:
    lane = self._lanes[order.generator_id]
    match order:
      case SubmitOrder():
        lane.submit(order.requests)
      case UnloadOrder():
        self._unload(lane)
      case LoadOrder():
        self._load(lane, order.version, carries_live=order.carries_live)
      case ExtractOrder():
        self._extract(lane, order)
      case RestoreOrder():
        self._restore(lane, order)
      case ForgetOrder():
        lane.forget(order.requests)
      case ResumeOrder():
        lane.resume(order.requests)
      case CancelOrder():
        self._cancel(lane, order)

  def _extract(self, lane: interfaces.Generator, order: ExtractOrder) -> None:
    start_s = time.perf_counter()
    # Lanes of one mesh hand pages over by their numbers.
    is_near = order.target_id in self._lanes
    parcels = lane.extract(order.requests, copies_kv=not is_near)
    found = {parcel.name for parcel in parcels}
    self._trace.span(
      self._tracks[order.generator_id],
      f"pack for {order.target_id}",
      start_s,
      time.perf_counter(),
      requests=len(parcels),
    )
    self._post(
      Extracted(
        source_id=order.generator_id,
        target_id=order.target_id,
        parcels=parcels,
        missing=tuple(n for n in order.requests if n not in found),
      )
    )

  def _restore(self, lane: interfaces.Generator, order: RestoreOrder) -> None:
    start_s = time.perf_counter()
    names = tuple(parcel.name for parcel in order.parcels)
    ends = {"source_id": order.source_id, "target_id": order.generator_id}
    try:
      num_kv_tokens = lane.restore(order.parcels)
    # The requests are still at their source, which goes on with them.
    except (ValueError, jax.errors.JaxRuntimeError) as error:
      logging.warning(
        "%d requests of generator %d stay there: %s",
        len(names),
        order.source_id,
        error,
      )
      self._post(RestoreFailed(**ends, requests=names, error=error))
      return
    self._trace.span(
      self._tracks[order.generator_id],
      f"move from {order.source_id}",
      start_s,
      time.perf_counter(),
      requests=len(names),
      kv_tokens=num_kv_tokens,
    )
    self._post(Restored(**ends, requests=names, num_kv_tokens=num_kv_tokens))

  def _cancel(self, lane: interfaces.Generator, order: CancelOrder) -> None:
    cancelled = tuple(lane.cancel(order.requests))
    found = {(group_id, member) for group_id, member, _ in cancelled}
    self._trace.instant(
      self._tracks[order.generator_id],
      "cancel",
      time.perf_counter(),
      requests=len(cancelled),
    )
    self._post(
      Cancelled(
        generator_id=order.generator_id,
        cancelled=cancelled,
        missing=tuple(n for n in order.requests if n not in found),
      )
    )

  def _unload(self, lane: interfaces.Generator) -> None:
    """Lets go of a version before the next comes, so that both never meet."""
    version = lane.version
    if version is not None:
      lane.unload()
      self._store.release(version, holder=self._names[lane.generator_id])

  def _load(
    self, lane: interfaces.Generator, version: int, *, carries_live: bool
  ) -> None:
    name = self._names[lane.generator_id]
    self.begin(f"loading version {version} into {name}")
    start_s = time.perf_counter()
    num_reprefilled = 0
    if carries_live and lane.version is not None:
      # Live requests need params at all times: for a moment there are both.
      before = lane.version
      params = self._store.place(version, holder=name)
      num_reprefilled = lane.refresh(version, params)
      self._store.release(before, holder=name)
    else:
      self._unload(lane)
      lane.load(version, self._store.place(version, holder=name))
    logprobs = lane.score(self._canary.tokens)
    self._canary.check(version, logprobs, who=name)
    self._trace.span(
      self._publish_track, f"v{version}", start_s, time.perf_counter(), to=name
    )
    self._post(
      Served(
        generator_id=lane.generator_id,
        version=version,
        num_reprefilled=num_reprefilled,
      )
    )

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
      self._slices.add(generator_id, version, start_s, end_s, len(trajectories))
      if trajectories:
        self._post(
          Sampled(generator_id=generator_id, trajectories=trajectories)
        )
      is_due = end_s - self._said_s[generator_id] >= _PROGRESS_S
      if trajectories or is_due:
        self._said_s[generator_id] = end_s
        self._post(self._progress(generator_id))

  def _progress(self, generator_id: int) -> Progress:
    lane = self._lanes[generator_id]
    return Progress(
      generator_id=generator_id,
      num_sampled=lane.counters.decoded_tokens,
      num_kv_tokens=lane.live_tokens(),
      num_waiting=lane.num_waiting(),
      pages_used=self.worker.pages_in_use,
      num_pages=self.worker.num_pages,
    )
