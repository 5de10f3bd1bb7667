"""Which generator serves which members, and which one takes a new version."""

import dataclasses
from collections.abc import Collection, Iterable


@dataclasses.dataclass(kw_only=True)
class GeneratorView:
  """A generator as the coordinator knows it.

  Attributes:
    generator_id: its id.
    num_slots: requests that it can run at once.
    version: what it serves; None before its first load.
    loading: the version that it is being given, if any.
    num_live: members submitted to it that have not finished.
  """

  generator_id: int
  num_slots: int
  version: int | None = None
  loading: int | None = None
  num_live: int = 0

  def num_free(self) -> int:
    """Slots that can take a request now."""
    return 0 if self.loading is not None else self.num_slots - self.num_live

  def is_idle(self) -> bool:
    """Whether it could take another version at once."""
    return self.loading is None and self.num_live == 0


def seats(
  generators: Iterable[GeneratorView],
  *,
  version: int,
  num_members: int,
  hosts: Iterable[int],
) -> list[tuple[int, int]]:
  """Seats members of one group, together where possible.

  Members go first to generators that already host the group, whose prompt
  pages they can share, then to one generator that has room for all of them,
  then to the emptiest.

  Args:
    generators: all of them.
    version: the group's.
    num_members: how many look for a slot.
    hosts: generators that run other members of the group.

  Returns:
    (generator_id, members) pairs; they sum up to less than `num_members` where
    slots are short.
  """
  hosting = set(hosts)
  candidates = [
    g for g in generators if g.version == version and g.num_free() > 0
  ]
  # Ties go to the emptier generator, then to the lower id. The share and not
  # the count of free slots is compared, so that unequal ones fill evenly.
  candidates.sort(
    key=lambda g: (
      g.generator_id not in hosting,
      g.num_free() < num_members,
      g.num_live / g.num_slots,
      g.generator_id,
    )
  )
  plan = []
  for generator in candidates:
    if not num_members:
      break
    taken = min(num_members, generator.num_free())
    plan.append((generator.generator_id, taken))
    num_members -= taken
  return plan


def generators_to_load(
  generators: Iterable[GeneratorView], *, newest_version: int
) -> list[int]:
  """Picks the idle generators that do not serve the newest version yet."""
  return [
    g.generator_id
    for g in generators
    if g.is_idle() and g.version != newest_version
  ]


def generators_to_fill(
  generators: Collection[GeneratorView],
  *,
  newest_version: int,
  oldest_version: int,
) -> list[GeneratorView]:
  """Picks the generators that may take new groups.

  Those of the newest version may. Legacy ones may fill their idle slots, but
  never at the oldest version, which has to end for the window to slide. Where
  nobody serves the newest version yet, the generator with the fewest live
  requests takes nothing new, so that it is soon empty and can load it, and the
  others go on meanwhile.

  Source: DORA, arXiv 2604.26256, section 4 (Algorithm 1, line 4).
  """
  serving = [g for g in generators if g.version is not None]
  if any(newest_version in (g.version, g.loading) for g in generators):
    may_fill = {newest_version} | {
      g.version for g in serving if (g.version or 0) > oldest_version
    }
    return [g for g in serving if g.version in may_fill]
  if not serving:
    return []
  draining = min(serving, key=lambda g: (g.num_live, g.generator_id))
  return [g for g in serving if g is not draining]
