"""A live request on its way: what it has sampled, and its KV.

Every token of a trajectory is of one version, so its KV is valid on any
generator of that version: it is carried along and never computed again.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from dora_jax import types
from dora_jax.generator import checks, kv_pool, pages


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Parcel:
  """One request without a slot; immutable, so that a failed move loses nothing.

  The KV is that of every token but the last, which is decoded next. It is in
  `kv`, off the pool, or in `claim`, in it. A request that is not prefilled yet,
  or in part, has neither; one whose KV belongs to a version that is not served
  any more has neither too, and is prefilled anew with all its tokens.

  Attributes:
    request: the request.
    version: that served it when it was packed, hence of its KV.
    was_refreshed: whether that may differ from the request's version.
    tokens: what it has sampled so far.
    logprobs: their log-probabilities in nats, as recorded then.
    kept_mass: see types.Trajectory.
    token_versions: the version that sampled each.
    kv: its pages, on some mesh or on the host, up to a power of two of them.
    claim: its pages in the pool of the mesh that it is on.
  """

  request: types.Request
  version: int
  was_refreshed: bool
  tokens: Int[np.ndarray, "T"]
  logprobs: Float[np.ndarray, "T"]
  kept_mass: Float[np.ndarray, "T"]
  token_versions: Int[np.ndarray, "T"]
  kv: kv_pool.KvPool | None = None
  claim: pages.PageClaim | None = None

  @property
  def name(self) -> tuple[int, int]:
    """(group_id, member)."""
    return self.request.group_id, self.request.member

  @property
  def position(self) -> int:
    """Position of the token to feed next; all before it have KV."""
    return len(self.request.prompt) + len(self.tokens) - 1

  @property
  def num_kv_tokens(self) -> int:
    """Positions whose KV it brings along."""
    has_kv = self.kv is not None or self.claim is not None
    return self.position if has_kv else 0

  def prefilled(self) -> Int[np.ndarray, "T"]:
    """The tokens whose KV is prefill's, hence the same for whoever has them.

    Those are all before the one to feed next, but of a request that brings its
    KV along only the prompt's: what it has sampled got its KV by decoding.
    """
    if self.kv is not None or self.claim is not None:
      return self.request.prompt[:-1]
    return np.concatenate([self.request.prompt, self.tokens])[:-1]

  def aged(self, version: int) -> "Parcel":
    """The same under another version, so without its KV."""
    return dataclasses.replace(
      self, version=version, was_refreshed=True, kv=None, claim=None
    )


def new_parcel(request: types.Request, version: int) -> Parcel:
  """A request that has sampled nothing yet."""
  return Parcel(
    request=request,
    version=version,
    was_refreshed=False,
    tokens=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    kept_mass=np.zeros(0, np.float32),
    token_versions=np.zeros(0, np.int32),
  )


def check_parcels(
  parcels: Sequence[Parcel],
  *,
  generator_id: int,
  version: int | None,
  pool: kv_pool.SharedPool,
  max_length: int,
  vocab_size: int,
) -> None:
  """Raises where a lane that serves this version cannot go on with them."""
  for parcel in parcels:
    request = parcel.request
    name = f"Member {request.member} of group {request.group_id}"
    if parcel.version != version:
      raise ValueError(
        f"{name} has KV of version {parcel.version} but generator "
        f"{generator_id} serves version {version}: a request moves between "
        "generators of one version."
      )
    checks.check_request(
      request,
      generator_id=generator_id,
      version=request.version if parcel.was_refreshed else version,
      max_length=max_length,
      vocab_size=vocab_size,
    )
    if len(parcel.tokens) >= request.max_new_tokens:
      raise ValueError(
        f"{name} has sampled {len(parcel.tokens)} tokens of at most "
        f"{request.max_new_tokens}: a finished request does not move."
      )
    if parcel.kv is not None:
      _check_kv(parcel, parcel.kv, pool, name)
    if parcel.claim is not None:
      _check_claim(parcel.claim, pool.allocator, name)


def _check_kv(
  parcel: Parcel, kv: kv_pool.KvPool, pool: kv_pool.SharedPool, name: str
) -> None:
  """Raises where carried pages are not of the pool's form, or too few."""
  found, needed = kv.page_format, pool.kv.page_format
  if found != needed:
    raise ValueError(
      f"{name} brings KV of (layers, page, dtype) {found}; needed is {needed}: "
      "all generators of a run take one config.generator."
    )
  if kv.num_pages * pool.page_size < parcel.position:
    raise ValueError(
      f"{name} brings {kv.num_pages} pages of {pool.page_size} positions; "
      f"needed are {parcel.position} positions."
    )


def _check_claim(
  claim: pages.PageClaim, allocator: pages.PageAllocator, name: str
) -> None:
  """Raises where pages handed over by id are elsewhere, or gone."""
  if claim.allocator is not allocator:
    raise ValueError(
      f"{name} names pages of another mesh: between meshes they must be "
      "copied, by extract(copies_kv=True)."
    )
  if not claim.is_held:
    raise ValueError(
      f"{name} names pages that were released meanwhile: it was finished, "
      "refreshed or cancelled where it came from."
    )
