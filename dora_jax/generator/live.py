"""A request in a slot, and the trajectory that it becomes."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from dora_jax import types
from dora_jax.generator import kv_pool, kv_transfer, pages, scheduler


@dataclasses.dataclass(kw_only=True, eq=False)
class Live:
  """A request in a slot, and what it has sampled so far, chunk by chunk.

  Attributes:
    request: the request.
    prompt_key: under which it shares pages; with the version of its KV.
    claim: its pages.
    was_refreshed: whether its tokens may be of several versions.
    is_paused: whether it keeps slot and pages but is not decoded.
    tokens: sampled token ids.
    logprobs: their log-probabilities in nats.
    versions: the version that sampled each.
    num_sampled: how many there are.
  """

  request: types.Request
  prompt_key: scheduler.PromptKey
  claim: pages.PageClaim
  was_refreshed: bool
  is_paused: bool = False
  tokens: list[Int[np.ndarray, "_"]]
  logprobs: list[Float[np.ndarray, "_"]]
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

  def append(
    self,
    tokens: Int[np.ndarray, "T"],
    logprobs: Float[np.ndarray, "T"],
    versions: Int[np.ndarray, "T"],
  ) -> None:
    """Adds what a chunk of decode steps has sampled for it."""
    self.tokens.append(tokens)
    self.logprobs.append(logprobs)
    self.versions.append(versions)
    self.num_sampled += len(tokens)

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
      token_versions=np.concatenate(self.versions),
      kv=kv,
      claim=claim,
    )


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
    finish_reason=reason,
  )
