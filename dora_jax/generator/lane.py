"""One generator: a slot batch at one version, on a mesh that it may share."""

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from dora_jax import interfaces, types
from dora_jax.generator import checks, kv_pool, pages, scheduler, verbs
from dora_jax.generator import engine as engine_lib
from dora_jax.model import transformer


@dataclasses.dataclass(kw_only=True)
class Counters:
  """What a lane has done since it was made; only ever grows.

  Attributes:
    decoded_tokens: tokens sampled.
    prefilled_tokens: tokens whose KV was computed by prefill.
    shared_prompts: requests that found their prompt prefilled.
    busy_slot_steps: decode steps of slots with a request.
    total_slot_steps: decode steps of all slots.
  """

  decoded_tokens: int = 0
  prefilled_tokens: int = 0
  shared_prompts: int = 0
  busy_slot_steps: int = 0
  total_slot_steps: int = 0


@dataclasses.dataclass(kw_only=True)
class _Live:
  """A request in a slot, and what it has sampled so far, chunk by chunk."""

  request: types.Request
  prompt_key: scheduler.PromptKey
  page_ids: list[int]
  tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
  logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
  versions: list[np.ndarray] = dataclasses.field(default_factory=list)
  num_sampled: int = 0


class Lane:
  """Serves the requests of one version at a time; implements Generator.

  Not for several threads: the one that drives the mesh calls everything.

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
  ):
    self.generator_id = generator_id
    self.version: int | None = None
    self.num_slots = num_slots
    self.counters = Counters()
    self._engine = engine
    self._pool = pool
    self._vocab_size = config.vocab_size
    self._max_length = max_length
    self._stop_ids = frozenset(stop_ids)
    self._served: verbs.Served | None = None
    self._slots = engine.create_slots(num_slots)
    self._waiting: collections.deque[types.Request] = collections.deque()
    self._live: dict[int, _Live] = {}
    # Slots of the live requests of each prompt, which share its full pages.
    self._members: dict[scheduler.PromptKey, list[int]] = {}
    self._chunk: verbs.Chunk | None = None

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
    self._served = self._engine.serve(version, params)
    self.version = version

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
    self._served = None
    self.version = None

  def score(self, tokens: np.ndarray) -> np.ndarray:
    """Log-probability of each token but the first under what is loaded."""
    return self._engine.score(self._loaded(), tokens)

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
    self._waiting.extend(requests)

  def num_live(self) -> int:
    """Requests accepted and not yet returned."""
    return len(self._waiting) + len(self._live)

  def step(self) -> list[types.Trajectory]:
    """Advances every live request by a chunk; returns those that finished."""
    self.launch()
    return self.collect()

  def launch(self) -> None:
    """Fills free slots and starts a chunk on the mesh, without waiting."""
    if self._chunk is not None:
      raise RuntimeError(
        f"Generator {self.generator_id} has a chunk under way: collect it."
      )
    if not self.num_live():
      return
    served = self._loaded()
    self._admit(served)
    if not self._live:
      # Other lanes hold the pages that the first request waits for.
      return
    self._pool.kv, self._slots, self._chunk = self._engine.decode(
      served, self._pool.kv, self._slots
    )

  def collect(self) -> list[types.Trajectory]:
    """Waits for the chunk under way, if any; returns what it finished."""
    if self._chunk is None:
      return []
    # The one wait for the mesh in a step.
    chunk = jax.device_get(self._chunk)
    self._chunk = None
    num_sampled_B = chunk.is_sampled_TB.sum(axis=0)
    num_steps = int(num_sampled_B.max())
    self.counters.decoded_tokens += int(num_sampled_B.sum())
    self.counters.busy_slot_steps += int(num_sampled_B.sum())
    self.counters.total_slot_steps += num_steps * self.num_slots
    finished = []
    for slot, live in list(self._live.items()):
      count = int(num_sampled_B[slot])
      live.tokens.append(chunk.token_TB[:count, slot])
      live.logprobs.append(chunk.logprob_TB[:count, slot])
      live.versions.append(chunk.version_TB[:count, slot])
      live.num_sampled += count
      is_stopped = int(chunk.token_TB[count - 1, slot]) in self._stop_ids
      if is_stopped or live.num_sampled == live.request.max_new_tokens:
        finished.append(self._finish(live, "stop" if is_stopped else "length"))
        self._free(slot)
    return finished

  def _loaded(self) -> verbs.Served:
    if self._served is None:
      raise RuntimeError(f"Generator {self.generator_id} has no params loaded.")
    return self._served

  def _admit(self, served: verbs.Served) -> None:
    plan = scheduler.plan_admissions(
      self._waiting,
      free_slots=[s for s in range(self.num_slots) if s not in self._live],
      num_free_pages=self._pool.allocator.num_free,
      page_size=self._engine.page_size,
      live_prompts=self._members.keys(),
    )
    if not plan:
      return
    entries = [self._enter(admission) for admission in plan]
    self._prefill(served, [a.slot for a in plan if a.is_first])
    self._pool.kv, self._slots = self._engine.insert(
      self._pool.kv, self._slots, entries
    )

  def _enter(self, admission: scheduler.Admission) -> engine_lib.Entry:
    """Takes the request off the queue and gives it its slot and pages."""
    request = self._waiting.popleft()
    assert request is admission.request
    allocator = self._pool.allocator
    position = len(request.prompt) - 1
    copied_from = None
    if admission.is_first:
      shared = allocator.alloc(admission.num_shared)
    else:
      self.counters.shared_prompts += 1
      relative = self._live[self._members[admission.prompt_key][0]]
      shared = relative.page_ids[: admission.num_shared]
      allocator.share(shared)
      # What the relative has decoded into this page since lies at positions
      # that this request writes before it reads them.
      if position % self._engine.page_size:
        copied_from = relative.page_ids[admission.num_shared]
    page_ids = shared + allocator.alloc(admission.num_private)
    self._live[admission.slot] = _Live(
      request=request, prompt_key=admission.prompt_key, page_ids=page_ids
    )
    self._members.setdefault(admission.prompt_key, []).append(admission.slot)
    return engine_lib.Entry(
      slot=admission.slot,
      page_ids=page_ids,
      token=int(request.prompt[-1]),
      position=position,
      last_position=position + request.max_new_tokens,
      temperature=request.temperature,
      draw=(request.stream, request.group_id, request.member),
      copied_from=copied_from,
    )

  def _prefill(self, served: verbs.Served, slots: Sequence[int]) -> None:
    """Prefills the prompts of these slots, one call a bucket of lengths."""
    buckets = collections.defaultdict(list)
    for slot in slots:
      live = self._live[slot]
      tokens = live.request.prompt[:-1]
      num_pages = pages.num_pages_for(len(tokens), self._engine.page_size)
      if num_pages:
        bucket = self._engine.bucket_pages(len(tokens))
        buckets[bucket].append((tokens, live.page_ids[:num_pages]))
        self.counters.prefilled_tokens += len(tokens)
    for rows in buckets.values():
      self._pool.kv = self._engine.prefill(
        served, self._pool.kv, rows, num_rows=self.num_slots
      )

  def _free(self, slot: int) -> None:
    """Gives slot and pages back; on the mesh the slot is inactive already."""
    live = self._live.pop(slot)
    self._pool.allocator.release(live.page_ids)
    members = self._members[live.prompt_key]
    members.remove(slot)
    if not members:
      del self._members[live.prompt_key]

  def _finish(
    self, live: _Live, reason: types.FinishReason
  ) -> types.Trajectory:
    request = live.request
    logprobs = np.concatenate(live.logprobs)
    versions = np.concatenate(live.versions)
    name = f"Member {request.member} of group {request.group_id}"
    if not np.isfinite(logprobs).all():
      raise FloatingPointError(
        f"{name} has log-probabilities that are not finite at version "
        f"{request.version}: the params or the KV pool hold NaN or infinity."
      )
    if (versions != request.version).any():
      raise RuntimeError(
        f"{name} is of version {request.version} but versions "
        f"{sorted(set(versions.tolist()))} sampled it."
      )
    return types.Trajectory(
      group_id=request.group_id,
      member=request.member,
      version=request.version,
      token_versions=versions,
      prompt=request.prompt,
      completion=np.concatenate(live.tokens),
      behavior_logprobs=logprobs,
      finish_reason=reason,
    )
