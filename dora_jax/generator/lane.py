"""One generator: a slot batch at one version, on a mesh that it may share."""

from collections.abc import Collection, Sequence

import numpy as np

from dora_jax import interfaces, types
from dora_jax.generator import (
  checks,
  flights,
  kv_pool,
  kv_transfer,
  roster,
  slot_batch,
  stopping,
  verbs,
)
from dora_jax.generator import engine as engine_lib
from dora_jax.model import transformer

# A chunk ends early when one in so many slots has become free and others wait
# for it. With fewer, slots are idle longer; with more, the host refills them
# more often than it is worth.
_REFILLS = 8


class Lane:
  """Serves the requests of one version at a time; implements Generator.

  Not for several threads: the one that drives the mesh calls everything. Up to
  `chunks_ahead` chunks are under way between two calls of `step`, so that the
  mesh need not wait for the host; whatever else changes who is in the slots
  waits for them first, and `step` then returns what they have finished.

  A request moves in two phases, so that a failed move leaves it where it was:
  `extract` packs it and pauses it here, `restore` takes it over elsewhere, and
  only then `forget` frees its place; or `resume` goes on with it here.

  Attributes:
    generator_id: its id, unique in the run.
    version: of the params loaded; None before the first.
    num_slots: requests that it decodes at once.
    counters: what it has done.
  """

  def __init__(
    self,
    *,
    generator_id: int,
    num_slots: int,
    engine: engine_lib.Engine,
    pool: kv_pool.SharedPool,
    config: transformer.ModelConfig,
    max_length: int,
    stop_ids: Sequence[int],
    decode_text: stopping.Decode,
    chunks_ahead: int,
  ):
    self.generator_id = generator_id
    self.version: int | None = None
    self.num_slots = num_slots
    self.counters = slot_batch.Counters()
    self._engine = engine
    self._pool = pool
    self._vocab_size = config.vocab_size
    self._max_length = max_length
    self._served: verbs.Served | None = None
    self._slots = slot_batch.SlotBatch(
      num_slots=num_slots, engine=engine, pool=pool, counters=self.counters
    )
    self._roster = roster.Roster(
      generator_id=generator_id,
      slots=self._slots,
      engine=engine,
      counters=self.counters,
    )
    self._chunks_ahead = chunks_ahead
    self._has_launched = False
    self._flights = flights.Flights(
      slots=self._slots,
      counters=self.counters,
      stop_ids=stop_ids,
      decode_text=decode_text,
    )

  def load(self, version: int, params: interfaces.Params) -> None:
    """Serves these params, which are on its mesh, from now on.

    Raises:
      RuntimeError: requests are live; they belong to the version before.
    """
    if self.num_live():
      raise RuntimeError(
        f"Generator {self.generator_id} cannot load version {version} while "
        f"{self.num_live()} requests of version {self.version} are live: a "
        "trajectory is sampled by one version, so let them finish first."
      )
    served = self._engine.serve(version, params)
    self._change(version, served)

  def unload(self) -> None:
    """Lets go of its params, so that they can be freed before others come.

    Raises:
      RuntimeError: requests are live.
    """
    if self.num_live():
      raise RuntimeError(
        f"Generator {self.generator_id} cannot let go of version "
        f"{self.version}: {self.num_live()} of its requests are live."
      )
    self._change(None, None)

  def discard(self) -> None:
    """Lets go of its params whatever is live; it is of no use afterwards."""
    self.version, self._served = None, None

  def refresh(self, version: int, params: interfaces.Params) -> int:
    """Serves newer params, under which the live requests go on.

    Breaks C1, for the schedule partial_rollout: what they sample from now on is
    of this version, and their KV is computed anew. Whoever finds no pages for
    that, because other lanes hold some of those it had, waits for them. Parcels
    packed before stay of the version before.

    Returns:
      Tokens whose KV was computed anew.

    Raises:
      ValueError: the version is older than the one served.
    """
    self._land()
    if self.version is None or version < self.version:
      raise ValueError(
        f"Generator {self.generator_id} serves version {self.version}, which "
        f"cannot be refreshed to version {version}: load one, and no older one."
      )
    served = self._engine.serve(version, params)
    before = self.counters.reprefilled_tokens
    # Everyone leaves, and comes back by the way of those who bring no KV.
    self._roster.age(version)
    self._change(version, served)
    # Nobody of this lane can be decoded before, so nothing is gained by chunks.
    while self._slots.fill(served, self._roster.line, version, admits=True):
      pass
    return self.counters.reprefilled_tokens - before

  def score(self, tokens: np.ndarray) -> np.ndarray:
    """Log-probability of each token but the first under what is loaded."""
    return self._engine.score(self._loaded()[0], tokens)

  def submit(self, requests: Sequence[types.Request]) -> None:
    """Accepts all of these requests, or none and raises ValueError."""
    for request in requests:
      checks.check_request(
        request,
        generator_id=self.generator_id,
        version=self.version,
        max_length=self._max_length,
        vocab_size=self._vocab_size,
      )
    self._roster.submit(requests)

  def num_live(self) -> int:
    """Requests accepted and neither returned nor forgotten."""
    return self._roster.num_live() + len(self._flights.finished)

  def num_waiting(self) -> int:
    """Live requests that wait for a slot."""
    return len(self._roster.line)

  def live_tokens(self) -> int:
    """Positions whose KV live requests hold, in the pool or off it."""
    return self._roster.num_kv_tokens()

  def num_lacking_pages(self) -> int:
    """Pages that must become free before the first that waits for some enters.

    0 where none waits, none may enter for want of a slot, or all are free.
    """
    if self.version is None:
      return 0
    return self._roster.num_lacking_pages(self.version, self._pool.allocator)

  def spillable(self) -> list[roster.Name]:
    """Requests that `spill` would take pages from, the youngest first."""
    return self._roster.spillable()

  def can_advance(self, *, admits: bool = True) -> bool:
    """Whether `step` would do anything; not while all it has is paused."""
    if self._slots.num_running() or self._flights or self._flights.finished:
      return True
    if self.version is None:
      return False
    return self._slots.can_fill(self._roster.line, self.version, admits=admits)

  def step(self) -> list[types.Trajectory]:
    """Advances every live request by a chunk; returns those that finished."""
    self.launch()
    return self.collect()

  def launch(self, *, admits: bool = True) -> None:
    """Prefills a chunk, for free slots if it may, and starts to decode one.

    It waits for neither.
    """
    if self._has_launched:
      raise RuntimeError(
        f"Generator {self.generator_id} has launched a chunk: collect first."
      )
    if not self._roster.num_live():
      return
    served, version = self._loaded()
    has_begun = self._slots.has_begun()
    is_filling = self._slots.fill(
      served, self._roster.line, version, admits=admits
    )
    if not self._slots.num_running():
      # A prompt is longer than a chunk, other lanes hold the pages that the
      # first request waits for, or all requests are paused.
      return
    if is_filling and not has_begun:
      # Few slots cost as much to decode as all, and none would stall by waiting
      # for the others.
      return
    # Nobody gains by a chunk that ends early but who could enter.
    enough_ended = self.num_slots
    if admits and self._roster.line:
      enough_ended = -(-self.num_slots // _REFILLS)
    self._pool.kv, self._slots.on_mesh, packed = self._engine.decode(
      served, self._pool.kv, self._slots.on_mesh, enough_ended=enough_ended
    )
    self._flights.add(packed)
    self._has_launched = True

  def collect(self) -> list[types.Trajectory]:
    """Waits for chunks until few enough are under way; what is finished.

    Where `launch` had nothing to launch, none is left under way.
    """
    most_left = self._chunks_ahead if self._has_launched else 0
    self._has_launched = False
    self._flights.land(most_left=most_left)
    return self._flights.take_finished()

  def extract(
    self, requests: Collection[roster.Name], *, copies_kv: bool = True
  ) -> list[kv_transfer.Parcel]:
    """Pauses requests and packs them, to go on elsewhere.

    Args:
      requests: of training; those that are not here any more are left out.
      copies_kv: packs copies of their pages, for any mesh. If not, parcels name
        the pages, for a lane that shares the pool with this one.

    Returns:
      Parcels, which stay good whatever happens here if their KV is a copy.

    Raises:
      RuntimeError: one is paused already.
    """
    self._land()
    return self._roster.extract(requests, copies_kv=copies_kv)

  def restore(self, parcels: Sequence[kv_transfer.Parcel]) -> int:
    """Takes over all of these requests, or none; they enter before new ones.

    What they sample from now on, and its log-probabilities, are by not a bit
    other than where they came from, if both compute alike.

    Returns:
      Positions whose KV came along.

    Raises:
      ValueError: one cannot be served, or its pages are not there any more.
    """
    self._land()
    kv_transfer.check_parcels(
      parcels,
      generator_id=self.generator_id,
      version=self.version,
      pool=self._pool,
      max_length=self._max_length,
      vocab_size=self._vocab_size,
    )
    return self._roster.restore(parcels)

  def forget(self, requests: Collection[roster.Name]) -> None:
    """Frees what paused requests hold here: another generator has them.

    Raises:
      RuntimeError: one is not paused. One that is not here is left out.
    """
    self._land()
    self._roster.forget(requests)

  def resume(self, requests: Collection[roster.Name]) -> None:
    """Goes on with paused requests that no other generator has taken."""
    self._land()
    self._roster.resume(requests)

  def spill(self, requests: Collection[roster.Name]) -> list[roster.Name]:
    """Carries the KV of requests to the host, to make room for a while.

    They come back, without a token prefilled, when there is room for them.

    Returns:
      Those that were here, held pages, and were not paused; but not one that is
      half prefilled, which has no KV to carry and only gives its pages back.
    """
    self._land()
    return self._roster.spill(requests)

  def cancel(
    self, requests: Collection[roster.Name]
  ) -> list[tuple[int, int, int]]:
    """Gives up requests, and what they have sampled.

    Returns:
      (group_id, member, sampled tokens) of those that were here.
    """
    self._land()
    return self._roster.cancel(requests)

  def _change(self, version: int | None, served: verbs.Served | None) -> None:
    self._land()
    if self.version is not None:
      self._pool.unserve(self.version)
    if version is not None:
      self._pool.serve(version)
    self.version, self._served = version, served

  def _loaded(self) -> tuple[verbs.Served, int]:
    if self._served is None or self.version is None:
      raise RuntimeError(f"Generator {self.generator_id} has no params loaded.")
    return self._served, self.version

  def _land(self) -> None:
    """Waits for all chunks, before something else touches slots or pages."""
    self._flights.land(most_left=0)
