"""What the coordinator hears (events) and what it asks for (commands).

Plain frozen data that pickles, so that a process or host boundary can run
between the coordinator and the parts that carry its commands out.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorJoined:
  """A generator is ready for its first Load.

  Attributes:
    generator_id: its id; never used by another before.
    num_slots: requests that it runs at once.
    mesh_id: its mesh; lanes of one mesh share params and pages.
    kv_capacity: tokens whose KV its mesh holds, shared by the mesh's lanes.
  """

  generator_id: int
  num_slots: int
  mesh_id: int
  kv_capacity: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorLost:
  """A generator is gone, with the requests that it ran."""

  generator_id: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionLost:
  """No copy of a version is left: what is unfinished of it begins anew.

  It comes before the GeneratorLost of those that had the last copy. The newest
  version is never lost, for the trainer keeps it.
  """

  version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed:
  """The process has ended and another has restored the coordinator's snapshot.

  No generator is left, nor anything that was under way; what is still needed is
  commanded anew.

  Attributes:
    versions: older than the newest, of which the params were saved as well, so
      that their groups go on; those of others start anew at the newest version.
  """

  versions: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
  """A generator serves this version, and has acknowledged its checksum.

  Attributes:
    generator_id: the generator.
    version: what it serves now.
    num_reprefilled: tokens of live requests whose KV was computed anew.
  """

  generator_id: int
  version: int
  num_reprefilled: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
  """How a generator fares; decides nothing by itself.

  Attributes:
    generator_id: the generator.
    num_sampled: tokens that it has sampled since it joined.
    num_kv_tokens: positions whose KV its live requests hold.
    num_waiting: live requests without a slot; as none gets more than it has
      slots, they wait for pages, or for others' prompts to be prefilled.
    pages_used: pages of its mesh that are held, by whichever lane.
    num_pages: pages of its mesh.
  """

  generator_id: int
  num_sampled: int
  num_kv_tokens: int
  num_waiting: int
  pages_used: int
  num_pages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
  """A generator has sampled the last token of one trajectory.

  Attributes:
    generator_id: who ran it.
    group_id: its group.
    member: its index in the group.
    version: that sampled its first token.
    num_tokens: sampled, the stop token included.
  """

  generator_id: int
  group_id: int
  member: int
  version: int
  num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
  """A Move has ended, whether or not anything arrived.

  Attributes:
    source_id: the generator that had the requests.
    target_id: the one that was to get them.
    moved: (group_id, member) of those that it has.
    left: of those that stayed, or had finished before.
    num_kv_tokens: token positions carried.
  """

  source_id: int
  target_id: int
  moved: tuple[tuple[int, int], ...]
  left: tuple[tuple[int, int], ...]
  num_kv_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cancelled:
  """A Cancel is done: (group_id, member, sampled tokens) of those found.

  One that is not found has finished before, and its Finished came first.
  """

  generator_id: int
  cancelled: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
  """The reward of one trajectory is known.

  Attributes:
    group_id: its group.
    member: its index in the group.
    is_solved: whether the reward, before any shaping, is that of a solved
      prompt; None where nobody asks.
  """

  group_id: int
  member: int
  is_solved: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreFailed:
  """No reward can be had for one trajectory; `reason` is a counter's name."""

  group_id: int
  member: int
  reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDone:
  """The trainer has made this version and published it to the store."""

  version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSkipped:
  """A step has changed nothing, and no version comes of it.

  Attributes:
    step: which; it is made of other groups.
    reason: why they are dropped, a counter's name.
  """

  step: int
  reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataExhausted:
  """Only the groups 0 … num_groups − 1 exist."""

  num_groups: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRequested:
  """Somebody asks for an early end; the running step is finished first."""

  reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tick:
  """Time has passed; what is due by the clock is decided."""


Event = (
  GeneratorJoined
  | GeneratorLost
  | VersionLost
  | Resumed
  | Loaded
  | Progress
  | Finished
  | Moved
  | Cancelled
  | Tick
  | Scored
  | ScoreFailed
  | StepDone
  | StepSkipped
  | DataExhausted
  | StopRequested
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
  """Make this generator serve this version.

  Attributes:
    generator_id: the generator.
    version: what it shall serve.
    carries_live: whether its live requests go on under the new version, their
      KV computed anew; else it has none.
  """

  generator_id: int
  version: int
  carries_live: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submit:
  """Generate these members of a group by this version on this generator."""

  generator_id: int
  group_id: int
  members: tuple[int, ...]
  version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
  """Carry these live requests, (group_id, member), to another generator."""

  source_id: int
  target_id: int
  version: int
  requests: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cancel:
  """Forget these live requests, (group_id, member)."""

  generator_id: int
  requests: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restart:
  """Forget what a group has so far: it is generated anew, later."""

  group_id: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """Find the reward of one finished trajectory."""

  group_id: int
  member: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
  """Make step `step`, from version `step` to `step` + 1, on these groups.

  Attributes:
    step: which.
    group_ids: that no step has trained on.
    reused_ids: that steps have trained on before; see reuse.py.
    kept_ids: trained groups, those of this step included, that a later step may
      reuse; all others can be forgotten.
  """

  step: int
  group_ids: tuple[int, ...]
  reused_ids: tuple[int, ...] = ()
  kept_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drop:
  """Forget a group that will never be trained, for the reason given."""

  group_id: int
  reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
  """No request of this version is left and no generator serves it: free it."""

  version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
  """The run is over: "finished", "data_exhausted", or the reason asked for."""

  reason: str


Command = (
  Load
  | Submit
  | Move
  | Cancel
  | Restart
  | Score
  | Train
  | Drop
  | Release
  | Stop
)
