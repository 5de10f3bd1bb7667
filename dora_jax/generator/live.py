"""A request in a slot, and the trajectory that it becomes."""

import dataclasses
from collections.abc import Collection

import numpy as np
from jaxtyping import Float, Int

from dora_jax import types
from dora_jax.generator import (
  kv_pool,
  kv_transfer,
  pages,
  scheduler,
  stopping,
  verbs,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
  """What a request has taken from a chunk.

  Attributes:
    num_kept: tokens that belong to its completion.
    num_cut: tokens after its end.
    reason: why it has ended; None where it goes on.
    overran: whether its slot goes on all the same, as the mesh does not know.
  """

  num_kept: int
  num_cut: int
  reason: types.FinishReason | None
  overran: bool


@dataclasses.dataclass(kw_only=True, eq=False)
class Live:
  """A request in a slot, and what it has sampled so far, chunk by chunk.

  Attributes:
    request: the request.
    prompt_key: under which it shares pages; with the version of its KV.
    claim: its pages.
    was_refreshed: whether its tokens may be of several versions.
    is_paused: whether it keeps slot and pages but is not decoded.
    has_ended: whether its trajectory is done, though chunks that are under way
      may still decode it.
    tokens: sampled token ids.
    logprobs: their log-probabilities in nats.
    kept_mass: see types.Trajectory.
    versions: the version that sampled each.
    num_sampled: how many there are.
  """

  request: types.Request
  prompt_key: scheduler.PromptKey
  claim: pages.PageClaim
  was_refreshed: bool
  is_paused: bool = False
  has_ended: bool = False
  tokens: list[Int[np.ndarray, "_"]]
  logprobs: list[Float[np.ndarray, "_"]]
  kept_mass: list[Float[np.ndarray, "_"]]
  versions: list[Int[np.ndarray, "_"]]
  num_sampled: int

  @property
  def name(self) -> tuple[int, int]:
    """(group_id, member)."""
    return self.request.group_id, self.request.member

  @property
  def position(self) -> int:
    """Position of the token to feed next; all before it have KV."""
    return len(self.request.prompt) - 1 + self.num_sampled

  def sequence(self) -> Int[np.ndarray, "S"]:
    """Prompt and what was sampled since."""
    return np.concatenate([self.request.prompt, *self.tokens])

  def take(
    self,
    chunk: verbs.Chunk,
    slot: int,
    *,
    stop_ids: Collection[int],
    decode: stopping.Decode,
  ) -> Taken:
    """Adds what its slot has sampled in a chunk, on the host, up to its end.

    Args:
      chunk: in which it has sampled a token at least.
      slot: its slot.
      stop_ids: stop tokens of all requests.
      decode: the text of token ids.
    """
    num_new = int(chunk.is_sampled_TB[:, slot].sum())
    tokens = chunk.token_TB[:num_new, slot]
    on_mesh = self._end_on_mesh(tokens, stop_ids)
    num_kept, reason = num_new, on_mesh
    found = self._end_by_text(tokens, decode)
    # A stop token goes before a repetition that ends with it.
    if found is not None and (found[0] < num_new or on_mesh != "stop"):
      num_kept, reason = found
    self.tokens.append(tokens[:num_kept])
    self.logprobs.append(chunk.logprob_TB[:num_kept, slot])
    self.kept_mass.append(chunk.kept_mass_TB[:num_kept, slot])
    self.versions.append(chunk.version_TB[:num_kept, slot])
    self.num_sampled += num_kept
    return Taken(
      num_kept=num_kept,
      num_cut=num_new - num_kept,
      reason=reason,
      overran=reason is not None and on_mesh is None,
    )

  def pack(
    self,
    *,
    kv: kv_pool.KvPool | None = None,
    claim: pages.PageClaim | None = None,
  ) -> kv_transfer.Parcel:
    """The request as it stands, to go on elsewhere."""
    version, _ = self.prompt_key
    return kv_transfer.Parcel(
      request=self.request,
      version=version,
      was_refreshed=self.was_refreshed,
      tokens=np.concatenate(self.tokens),
      logprobs=np.concatenate(self.logprobs),
      kept_mass=np.concatenate(self.kept_mass),
      token_versions=np.concatenate(self.versions),
      kv=kv,
      claim=claim,
    )

  def _end_on_mesh(
    self, new_tokens: Int[np.ndarray, "T"], stop_ids: Collection[int]
  ) -> types.FinishReason | None:
    """Why the mesh has ended it after its new tokens; None where it has not."""
    last = int(new_tokens[-1])
    if last in stop_ids or last in self.request.stopping.stop_ids:
      return "stop"
    num_sampled = self.num_sampled + len(new_tokens)
    return "length" if num_sampled == self.request.max_new_tokens else None

  def _end_by_text(
    self, new_tokens: Int[np.ndarray, "T"], decode: stopping.Decode
  ) -> tuple[int, types.FinishReason] | None:
    """See stopping.find_end: new tokens up to where it ends, and why."""
    num_looked_at = stopping.num_looked_at(self.request.stopping)
    if not num_looked_at:
      return None
    return stopping.find_end(
      np.concatenate([self._tail(num_looked_at - 1), new_tokens]),
      num_new=len(new_tokens),
      stopping=self.request.stopping,
      decode=decode,
    )

  def _tail(self, num_tokens: int) -> Int[np.ndarray, "_"]:
    """The last of its sampled tokens, as many as there are."""
    found: list[Int[np.ndarray, "_"]] = []
    num_left = num_tokens
    for tokens in reversed(self.tokens):
      if num_left <= 0:
        break
      found.insert(0, tokens[-num_left:])
      num_left -= len(tokens)
    return np.concatenate([np.zeros(0, np.int32), *found])


def unpack(
  parcel: kv_transfer.Parcel,
  *,
  prompt_key: scheduler.PromptKey,
  claim: pages.PageClaim,
) -> Live:
  """The request of a parcel, in a slot again."""
  return Live(
    request=parcel.request,
    prompt_key=prompt_key,
    claim=claim,
    was_refreshed=parcel.was_refreshed,
    tokens=[parcel.tokens],
    logprobs=[parcel.logprobs],
    kept_mass=[parcel.kept_mass],
    versions=[parcel.token_versions],
    num_sampled=len(parcel.tokens),
  )


def finish(live: Live, reason: types.FinishReason) -> types.Trajectory:
  """The trajectory of a request that has sampled its last token.

  Raises:
    FloatingPointError: a log-probability is not finite.
    RuntimeError: other versions sampled it than may have.
  """
  request = live.request
  logprobs = np.concatenate(live.logprobs)
  versions = np.concatenate(live.versions)
  name = f"Member {request.member} of group {request.group_id}"
  if not np.isfinite(logprobs).all():
    raise FloatingPointError(
      f"{name} has log-probabilities that are not finite at version "
      f"{request.version}: the params or the KV pool hold NaN or infinity."
    )
  if live.was_refreshed:
    is_allowed = versions[0] >= request.version and (np.diff(versions) >= 0)
    needed = "of that or newer ones, in order"
  else:
    is_allowed = versions == request.version
    needed = "of that alone"
  if not np.all(is_allowed):
    raise RuntimeError(
      f"{name} is of version {request.version}, and its tokens must be "
      f"{needed}, but versions {sorted(set(versions.tolist()))} sampled it."
    )
  return types.Trajectory(
    group_id=request.group_id,
    member=request.member,
    version=request.version,
    token_versions=versions,
    prompt=request.prompt,
    completion=np.concatenate(live.tokens),
    behavior_logprobs=logprobs,
    kept_mass=np.concatenate(live.kept_mass),
    finish_reason=reason,
  )
