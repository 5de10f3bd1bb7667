"""Algorithm 1 by hand, against its properties, and against brute force."""

import collections
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from dora_jax.coordinator import partition


@pytest.mark.parametrize(
  ("live", "num_generators", "least", "counts"),
  [
    # The paper's example: quotas 4 * (4, 3, 16) / 23 = 0.70, 0.52, 2.78. The
    # remainders give V4 and V2 one more; then V3's least comes from V4.
    ({1: 0, 2: 4, 3: 3, 4: 16}, 4, {}, {2: 1, 3: 1, 4: 2}),
    # 8 * (5, 3, 2) / 10 = 4.0, 2.4, 1.6.
    ({1: 5, 2: 3, 3: 2}, 8, {}, {1: 4, 2: 2, 3: 2}),
    # 3 * 1 / 2 = 1.5 each: the newer version wins the tie.
    ({1: 7, 2: 7}, 3, {}, {1: 1, 2: 2}),
    # Version 1 needs three for its KV: version 2 gives one up.
    ({1: 10, 2: 10}, 4, {1: 3}, {1: 3, 2: 1}),
    # 6 * (1, 50, 50) / 101 = 0.06, 2.97, 2.97. Both could give one up to
    # version 1, which the trainer needs first: the newest does, needed last.
    ({1: 1, 2: 50, 3: 50}, 6, {}, {1: 1, 2: 3, 3: 2}),
    # Too few for all: the oldest first.
    ({1: 9, 2: 9, 3: 9}, 2, {}, {1: 1, 2: 1}),
    ({1: 9, 2: 9, 3: 9}, 4, {1: 3, 2: 3}, {1: 3, 2: 1}),
    ({1: 0}, 4, {}, {}),
  ],
)
def test_counts_by_hand(live, num_generators, least, counts):
  assert counts == partition.replica_counts(
    live, num_generators=num_generators, least=least
  )


@hypothesis.given(
  live=st.dictionaries(st.integers(0, 6), st.integers(0, 50), max_size=6),
  num_generators=st.integers(1, 40),
  least=st.dictionaries(st.integers(0, 6), st.integers(1, 4), max_size=6),
)
def test_counts_are_whole_enough_and_close_to_the_quota(
  live, num_generators, least
):
  counts = partition.replica_counts(
    live, num_generators=num_generators, least=least
  )
  floor = {w: least.get(w, 1) for w, n in live.items() if n}
  assert set(counts) <= set(floor)
  if not floor:
    assert not counts
  elif sum(floor.values()) > num_generators:
    assert sum(counts.values()) == num_generators
  else:
    assert sum(counts.values()) == num_generators
    assert all(counts[w] >= floor[w] for w in floor)
    total = sum(live.values())
    for w in floor:
      quota = num_generators * live[w] / total
      # Above its rounded quota only up to its least.
      assert counts[w] < max(quota + 1, floor[w] + 1)
      # Below it only where others were raised to their least.
      raised = sum(
        max(0, floor[v] - int(num_generators * live[v] / total))
        for v in floor
        if v != w
      )
      assert counts[w] > quota - 1 - raised


@st.composite
def problems(draw):
  num = draw(st.integers(1, 6))
  lanes = draw(st.sampled_from([1, 1, 2, 3]))
  replicas = []
  for generator_id in range(num):
    version = draw(st.one_of(st.none(), st.integers(0, 3)))
    replicas.append(
      partition.Replica(
        generator_id=generator_id,
        mesh_id=generator_id // lanes,
        version=version,
        leave_bytes=draw(st.integers(0, 50)),
        is_pinned=version is not None and draw(st.booleans()),
      )
    )
  num_seats = draw(st.sampled_from([num, num, num, max(0, num - 1)]))
  seats = [draw(st.integers(0, 4)) for _ in range(num_seats)]
  return replicas, collections.Counter(seats), draw(st.integers(0, 60))


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(problems())
def test_no_other_assignment_moves_fewer_bytes(problem):
  replicas, counts, weight_bytes = problem
  held = {(r.mesh_id, r.version) for r in replicas}

  def cost(replica, version):
    if replica.version == version:
      return 0
    is_held = (replica.mesh_id, version) in held
    return replica.leave_bytes + (0 if is_held else weight_bytes)

  target = partition.assign(replicas, counts, weight_bytes=weight_bytes)
  pinned = [r for r in replicas if r.is_pinned]
  assert all(target[r.generator_id] == r.version for r in pinned)
  # Everything but the pinned, tried in every order.
  loose = [r for r in replicas if not r.is_pinned]
  left = counts - collections.Counter(r.version for r in pinned)
  seats = sorted(left.elements())
  num_pairs = min(len(loose), len(seats))
  least = min(
    sum(cost(r, v) for r, v in zip(chosen, taken, strict=True))
    for chosen in itertools.combinations(loose, num_pairs)
    for taken in set(itertools.permutations(seats, num_pairs))
  )
  assert least == sum(
    cost(r, target[r.generator_id]) for r in loose if r.generator_id in target
  )
  # Seats are filled as far as there are generators, none twice.
  filled = collections.Counter(
    target[r.generator_id] for r in loose if r.generator_id in target
  )
  assert filled.total() == num_pairs and filled <= left
