"""What the runtime orders of generators, and what they answer."""

import dataclasses
from collections.abc import Sequence

from dora_jax import interfaces, types

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
