"""What the coordinator hears (events) and what it asks for (commands).

Plain frozen data that pickles, so that a process or host boundary can run
between the coordinator and the parts that carry its commands out.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratorJoined:
  """A generator is ready for its first Load."""

  generator_id: int
  num_slots: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
  """A generator serves this version, and has acknowledged its checksum."""

  generator_id: int
  version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
  """A generator has sampled the last token of one trajectory."""

  generator_id: int
  group_id: int
  member: int
  version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
  """The reward of one trajectory is known."""

  group_id: int
  member: int


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
class DataExhausted:
  """Only the groups 0 … num_groups − 1 exist."""

  num_groups: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRequested:
  """Somebody asks for an early end; the running step is finished first."""

  reason: str


Event = (
  GeneratorJoined
  | Loaded
  | Finished
  | Scored
  | ScoreFailed
  | StepDone
  | DataExhausted
  | StopRequested
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
  """Make this generator, which has no live request, serve this version."""

  generator_id: int
  version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submit:
  """Generate these members of a group by this version on this generator."""

  generator_id: int
  group_id: int
  members: tuple[int, ...]
  version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """Find the reward of one finished trajectory."""

  group_id: int
  member: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
  """Make step `step`, from version `step` to `step` + 1, on these groups."""

  step: int
  group_ids: tuple[int, ...]


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


Command = Load | Submit | Score | Train | Drop | Release | Stop
