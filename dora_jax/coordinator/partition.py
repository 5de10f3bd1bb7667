"""Algorithm 1: how many generators serve each version, and which ones.

Source: DORA, arXiv 2604.26256, section 4. What it leaves open is ours: rounding
by largest remainder, a least count for each version, and an assignment that
moves the fewest bytes.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replica:
  """A generator as the assignment sees it.

  Attributes:
    generator_id: its id.
    mesh_id: its mesh; a version that the mesh holds costs nothing to load.
    version: what it serves; None before its first load.
    leave_bytes: KV to carry away if it is to serve another version.
    is_pinned: whether it must keep its version for now.
  """

  generator_id: int
  mesh_id: int
  version: int | None
  leave_bytes: int
  is_pinned: bool = False


def replica_counts(
  num_live: Mapping[int, int],
  *,
  num_generators: int,
  least: Mapping[int, int],
) -> dict[int, int]:
  """Shares generators out in proportion to the live requests of each version.

  DP_w = num_generators * R_w / sum(R), rounded by largest remainder so that
  the counts sum up to num_generators, then raised to `least` at the cost of
  whoever has most above its own. Ties favour the newer version.

  Args:
    num_live: version -> R_w, its live requests; those with 0 get nothing.
    num_generators: to share out.
    least: version -> generators without which its requests would not fit; 1
      where it is not named.

  Returns:
    version -> count. Where there are too few generators for all, the oldest
    versions are served first, for the trainer waits for them; the sum is then
    num_generators too.
  """
  versions = sorted(w for w, live in num_live.items() if live > 0)
  if not versions:
    return {}
  floor = {w: least.get(w, 1) for w in versions}
  if sum(floor.values()) > num_generators:
    return _oldest_first(floor, num_generators)
  total = sum(num_live[w] for w in versions)
  # In integers: quota * total = num_generators * live, so no rounding decides.
  counts = {w: num_generators * num_live[w] // total for w in versions}
  by_remainder = sorted(
    versions, key=lambda w: (-(num_generators * num_live[w] % total), -w)
  )
  for w in by_remainder[: num_generators - sum(counts.values())]:
    counts[w] += 1
  for w in versions:
    while counts[w] < floor[w]:
      donor = max(versions, key=lambda v: (counts[v] - floor[v], v))
      counts[donor] -= 1
      counts[w] += 1
  return counts


def _oldest_first(floor: Mapping[int, int], left: int) -> dict[int, int]:
  counts = {}
  for w in sorted(floor):
    counts[w] = min(floor[w], left)
    left -= counts[w]
  return {w: count for w, count in counts.items() if count}


def assign(
  replicas: Sequence[Replica],
  counts: Mapping[int, int],
  *,
  weight_bytes: int,
) -> dict[int, int]:
  """Picks which generators serve which version, at the least bytes moved.

  A generator that changes version costs its KV, and the version's weights
  unless its mesh holds them. The sum is minimal: where generators share meshes
  it is an assignment problem, solved exactly.

  Args:
    replicas: all generators.
    counts: version -> generators, as from `replica_counts`.
    weight_bytes: of one version.

  Returns:
    generator_id -> version; a generator that no count asks for is left out.
  """
  target, seats = _keep(replicas, counts)
  in_play = [r for r in replicas if r.generator_id not in target]
  if not seats or not in_play:
    return target
  if _is_alone(replicas):
    # To leave and to load are then two sums, and who gets what is all the same.
    in_play.sort(key=lambda r: (r.leave_bytes, r.generator_id))
    ids = (replica.generator_id for replica in in_play)
    return target | dict(zip(ids, seats, strict=False))
  held = {(r.mesh_id, r.version) for r in replicas}
  cost = _costs(in_play, seats, held, weight_bytes)
  rows, columns = optimize.linear_sum_assignment(cost)
  for row, column in zip(rows, columns, strict=True):
    target[in_play[row].generator_id] = seats[column]
  return target


def _keep(
  replicas: Sequence[Replica], counts: Mapping[int, int]
) -> tuple[dict[int, int], list[int]]:
  """Who surely keeps its version, and the seats that are left to give.

  Where no two generators share a mesh, to load costs each the same, whatever
  the version. Then a version that loses none keeps its own (to swap one with a
  newcomer saves nothing) and the others keep those that are dearest to leave;
  that leaves nothing to solve, even of thousands of generators.
  """
  serving: dict[int, list[Replica]] = {}
  for replica in replicas:
    if replica.version is not None:
      serving.setdefault(replica.version, []).append(replica)
  is_alone = _is_alone(replicas)
  target: dict[int, int] = {}
  seats: list[int] = []
  for version in sorted({*counts, *serving}):
    mine, count = serving.get(version, []), counts.get(version, 0)
    pinned = [r for r in mine if r.is_pinned]
    if is_alone:
      mine = sorted(
        mine, key=lambda r: (not r.is_pinned, -r.leave_bytes, r.generator_id)
      )
      kept = mine[: max(count, len(pinned))]
    else:
      kept = pinned
    target |= dict.fromkeys((r.generator_id for r in kept), version)
    seats += [version] * (count - len(kept))
  return target, seats


def _is_alone(replicas: Sequence[Replica]) -> bool:
  """Whether no two generators share a mesh."""
  return len({replica.mesh_id for replica in replicas}) == len(replicas)


def _costs(
  in_play: Sequence[Replica],
  seats: Sequence[int],
  held: set[tuple[int, int | None]],
  weight_bytes: int,
) -> np.ndarray:
  """Bytes moved if generator i takes seat j."""
  versions = sorted(set(seats))
  by_version = np.array(
    [
      [
        0
        if replica.version == version
        else replica.leave_bytes
        + (0 if (replica.mesh_id, version) in held else weight_bytes)
        for version in versions
      ]
      for replica in in_play
    ],
    np.float64,
  )
  return by_version[:, np.searchsorted(versions, seats)]
