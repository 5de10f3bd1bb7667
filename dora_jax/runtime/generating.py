"""The thread of a generator mesh: its generators take turns on it."""

import time
from collections.abc import Mapping, Sequence

import jax
from absl import logging

from dora_jax import interfaces, trace, types
from dora_jax.coordinator import events as ev
from dora_jax.generator import worker as worker_lib
from dora_jax.runtime import canary as canary_lib
from dora_jax.runtime import mesh_base, orders, part, replicas, slices
from dora_jax.weights import store as store_lib

# How often a generator that decodes says how far it is.
_PROGRESS_S = 0.5


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
    base: mesh_base.MeshBase | None,
    canary: canary_lib.Canary,
    timeline: trace.Trace,
  ):
    """Wires.

    Args:
      post: reaches the runtime.
      mesh_id: of its mesh.
      worker: has the generators.
      names: generator -> what the store knows it by.
      store: has each version.
      base: what versions in the store are put on; None where they are whole.
      canary: tells whether a version is what it should be.
      timeline: of the run.
    """
    super().__init__(name=f"generator mesh {mesh_id}", post=post)
    self.busy_s = 0.0
    self.worker = worker
    self._names = names
    self._lanes = {lane.generator_id: lane for lane in worker.lanes}
    self._store = store
    self._base = base
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

  def work_done(self) -> replicas.Work:
    """What its lanes have decoded so far; any thread may ask."""
    counters = [lane.counters for lane in self.worker.lanes]
    return replicas.Work(
      slot_steps=sum(each.total_slot_steps for each in counters),
      busy_s=self.busy_s,
    )

  def discard(self) -> None:
    """Lets go of all that it has on its mesh, which has failed."""
    self.worker.discard()
    if self._base is not None:
      self._base.discard()

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

  def _carry_out(self, order: orders.Order) -> None:
    lane = self._lanes[order.generator_id]
    if not isinstance(order, orders.SubmitOrder):
      # It waits for the chunks under way: whoever hears that it is done must
      # have heard what they have finished.
      self._report(order.generator_id, lane.collect(), time.perf_counter())
    match order:
      case orders.SubmitOrder():
        lane.submit(order.requests)
      case orders.UnloadOrder():
        self._unload(lane)
      case orders.LoadOrder():
        self._load(lane, order.version, carries_live=order.carries_live)
      case orders.ExtractOrder():
        self._extract(lane, order)
      case orders.RestoreOrder():
        self._restore(lane, order)
      case orders.ForgetOrder():
        lane.forget(order.requests)
      case orders.ResumeOrder():
        lane.resume(order.requests)
      case orders.CancelOrder():
        self._cancel(lane, order)

  def _extract(
    self, lane: interfaces.Generator, order: orders.ExtractOrder
  ) -> None:
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
      orders.Extracted(
        source_id=order.generator_id,
        target_id=order.target_id,
        parcels=parcels,
        missing=tuple(n for n in order.requests if n not in found),
      )
    )

  def _restore(
    self, lane: interfaces.Generator, order: orders.RestoreOrder
  ) -> None:
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
      self._post(orders.RestoreFailed(**ends, requests=names, error=error))
      return
    self._trace.span(
      self._tracks[order.generator_id],
      f"move from {order.source_id}",
      start_s,
      time.perf_counter(),
      requests=len(names),
      kv_tokens=num_kv_tokens,
    )
    self._post(
      orders.Restored(**ends, requests=names, num_kv_tokens=num_kv_tokens)
    )

  def _cancel(
    self, lane: interfaces.Generator, order: orders.CancelOrder
  ) -> None:
    cancelled = tuple(lane.cancel(order.requests))
    found = {(group_id, member) for group_id, member, _ in cancelled}
    self._trace.instant(
      self._tracks[order.generator_id],
      "cancel",
      time.perf_counter(),
      requests=len(cancelled),
    )
    self._post(
      orders.Cancelled(
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
      num_reprefilled = lane.refresh(version, self._place(version, name))
      self._store.release(before, holder=name)
    else:
      self._unload(lane)
      lane.load(version, self._place(version, name))
    logprobs = lane.score(self._canary.tokens)
    self._canary.check(version, logprobs, who=name)
    self._trace.span(
      self._publish_track, f"v{version}", start_s, time.perf_counter(), to=name
    )
    self._post(
      orders.Served(
        generator_id=lane.generator_id,
        version=version,
        num_reprefilled=num_reprefilled,
      )
    )

  def _place(self, version: int, name: str) -> interfaces.Params:
    """All params of a version, on this mesh."""
    placed = self._store.place(version, holder=name)
    return placed if self._base is None else self._base.whole(placed)

  def _decode(self) -> None:
    # Anew for each chunk, so that a long one can be told.
    self.begin("decoding")
    # Each lane that is stepped; its last chunk may be one without requests.
    versions = {
      lane.generator_id: lane.version
      for lane in self._lanes.values()
      if lane.version is not None
    }
    start_s = time.perf_counter()
    finished = self.worker.step()
    end_s = time.perf_counter()
    self.busy_s += end_s - start_s
    for generator_id, trajectories in finished:
      version = versions[generator_id]
      self._slices.add(generator_id, version, start_s, end_s, len(trajectories))
      self._report(generator_id, trajectories, end_s)

  def _report(
    self,
    generator_id: int,
    trajectories: Sequence[types.Trajectory],
    now_s: float,
  ) -> None:
    """Says what is finished, and from time to time how far the rest is."""
    if trajectories:
      self._post(
        orders.Sampled(generator_id=generator_id, trajectories=trajectories)
      )
    is_due = now_s - self._said_s[generator_id] >= _PROGRESS_S
    if trajectories or is_due:
      self._said_s[generator_id] = now_s
      self._post(self._progress(generator_id))

  def _progress(self, generator_id: int) -> ev.Progress:
    lane = self._lanes[generator_id]
    return ev.Progress(
      generator_id=generator_id,
      num_sampled=lane.counters.decoded_tokens,
      num_kv_tokens=lane.live_tokens(),
      num_waiting=lane.num_waiting(),
      pages_used=self.worker.pages_in_use,
      num_pages=self.worker.num_pages,
    )
