"""A request that moves samples what it would have sampled where it was.

Tokens, behavior log-probabilities and versions are equal bit by bit, wherever
and however often it moves, also if a move fails or its KV waits on the host; no
page is lost, and no token is sampled twice.
"""

import functools

import jax
import numpy as np
import pytest

from tests.generator import tiny

# Group 1 shares two pages of prompt; the others begin at odd places.
_REQUESTS = (
  *(tiny.make_request(1, m, length=11, max_new_tokens=20) for m in range(3)),
  tiny.make_request(2, length=1, max_new_tokens=17, top_p=0.8),
  tiny.make_request(3, length=64, max_new_tokens=19, temperature=0.0),
)
_NAMES = tuple((r.group_id, r.member) for r in _REQUESTS)
_SETTINGS = {"stop_ids": (17,), "chunk_steps": 2}


@functools.cache
def _unmoved():
  lane = tiny.make_lane(lanes=[(0, 8)], **_SETTINGS)
  return tiny.by_request(tiny.run(lane, _REQUESTS)), lane.counters


def _pages_used(*lanes) -> int:
  return sum(lane._pool.allocator.num_used for lane in lanes)


def _move(source, target, names) -> list[tuple[int, int]]:
  is_near = source._pool is target._pool
  parcels = source.extract(names, copies_kv=not is_near)
  target.restore(parcels)
  moved = [parcel.name for parcel in parcels]
  source.forget(moved)
  return moved


@functools.cache
def _near():
  return tiny.make_lanes(lanes=[(0, 8), (1, 8)], **_SETTINGS)


@functools.cache
def _far(tensor=1):
  first = tiny.make_lane(lanes=[(0, 8)], tensor=tensor, **_SETTINGS)
  changes = {"lanes": [(5, 8)], "first": 4, "tensor": tensor}
  return first, tiny.make_lane(**changes, **_SETTINGS)


@pytest.mark.parametrize("lanes", [_near, _far], ids=["near", "far"])
@pytest.mark.parametrize("num_chunks", range(10))
def test_at_every_chunk(lanes, num_chunks):
  source, target = lanes()
  before = [
    lane.counters.prefilled_tokens + lane.counters.reprefilled_tokens
    for lane in (source, target)
  ]
  source.submit(_REQUESTS)
  finished = []
  for _ in range(num_chunks):
    finished += source.step()
  moved = _move(source, target, _NAMES)
  assert source.num_live() == 0 and target.num_live() == len(moved)
  if lanes is _far:
    assert _pages_used(source, target) == 0  # its KV is between the pools
  finished += tiny.run(target)
  expected, counters = _unmoved()
  assert tiny.by_request(finished) == expected
  assert _pages_used(source, target) == 0
  after = [
    lane.counters.prefilled_tokens + lane.counters.reprefilled_tokens
    for lane in (source, target)
  ]
  assert sum(after) - sum(before) == counters.prefilled_tokens
  if num_chunks:
    assert after[1] == before[1]


def test_between_meshes_of_two_devices():
  source, target = _far(tensor=2)
  expected = tiny.by_request(tiny.run(source, _REQUESTS))
  source.submit(_REQUESTS)
  finished = source.step() + source.step()
  _move(source, target, _NAMES[1:])
  finished += tiny.run(target) + tiny.run(source)
  assert tiny.by_request(finished) == expected


def test_a_failed_move_changes_nothing():
  source, _ = _far()
  other = tiny.make_lane(1, lanes=[(6, 8)], first=5, **_SETTINGS)
  large = tiny.make_lane(lanes=[(7, 8)], first=5, page_size=8, **_SETTINGS)
  source.submit(_REQUESTS)
  finished = source.step()
  for target, message in (
    (other, r"KV of version 0 but generator 6 serves version 1"),
    (large, r"\(2, 2, 8, 4, .*needed is \(\(2, 2, 8, 8, "),
  ):
    parcels = source.extract(_NAMES)
    assert source.step() == [] and not source.can_advance()
    assert source.num_live() == len(parcels) > 0
    with pytest.raises(ValueError, match=message):
      target.restore(parcels)
    assert target.num_live() == 0 and _pages_used(target) == 0
    source.resume(_NAMES)
    finished += source.step()
  finished += tiny.run(source)
  assert tiny.by_request(finished) == _unmoved()[0]
  assert _pages_used(source) == 0


def test_spilled_and_back():
  lane, _ = _far()
  lane.submit(_REQUESTS)
  finished = []
  before = lane.counters.reprefilled_tokens
  while lane.num_live():
    finished += lane.step()
    kv_tokens = lane.live_tokens()
    spilled = lane.spill(_NAMES)
    assert len(spilled) == lane.num_live()
    assert _pages_used(lane) == 0 and lane.live_tokens() == kv_tokens
  assert tiny.by_request(finished) == _unmoved()[0]
  assert lane.counters.reprefilled_tokens == before


def test_a_spilled_request_waits_for_pages_and_then_goes_on():
  lane, _ = _far()
  lane.submit(_REQUESTS[4:])
  lane.step()
  lane.spill(_NAMES[4:])
  allocator = lane._pool.allocator
  taken = allocator.alloc(allocator.num_free - 2)
  lane.submit(_REQUESTS[:4])
  # No other overtakes it, though one of them would fit.
  assert not lane.can_advance() and lane.step() == []
  allocator.release(taken)
  assert tiny.by_request(tiny.run(lane)) == _unmoved()[0]


@pytest.mark.parametrize("seed", range(4))
def test_any_number_of_moves_among_crowded_lanes(seed):
  """Moves, failed moves and spills at random; some targets have no slot."""
  rng = np.random.default_rng(seed)
  lanes = [
    *tiny.make_lanes(lanes=[(0, 8), (1, 2)], num_pages=60, **_SETTINGS),
    tiny.make_lane(lanes=[(5, 3)], first=4, num_pages=40, **_SETTINGS),
  ]
  lanes[0].submit(_REQUESTS)
  finished = lanes[0].step()
  prefilled = sum(lane.counters.prefilled_tokens for lane in lanes)
  num_moves = 0
  for _ in range(200):
    if not any(lane.num_live() for lane in lanes):
      break
    for lane in lanes:
      finished += lane.step()
    for lane in lanes:
      names = [name for name in _NAMES if rng.random() < 0.5]
      match rng.integers(3):
        case 0:
          lane.spill(names)
        case 1:
          lane.extract(names)
          finished += lane.step()
          lane.resume(names)
    for _ in range(2):
      source, target = rng.choice(3, 2, replace=False)
      names = [name for name in _NAMES if rng.random() < 0.6]
      num_moves += len(_move(lanes[source], lanes[target], names))
  expected, counters = _unmoved()
  assert num_moves > 3 and tiny.by_request(finished) == expected
  assert len(finished) == len(_REQUESTS)
  assert _pages_used(*lanes[1:]) == 0
  assert sum(lane.counters.decoded_tokens for lane in lanes) == sum(
    len(t.completion) for t in finished
  )
  assert prefilled == counters.prefilled_tokens
  assert prefilled == sum(lane.counters.prefilled_tokens for lane in lanes)
  assert not any(lane.counters.reprefilled_tokens for lane in lanes)


def test_what_is_packed_on_the_host_moves_too():
  source, target = _far()
  source.submit(_REQUESTS)
  finished = source.step()
  source.spill(_NAMES)
  parcels = source.extract(_NAMES)
  assert all(isinstance(p.kv.keys, np.ndarray) for p in parcels if p.kv)
  target.restore(parcels)
  source.forget(_NAMES)
  finished += tiny.run(target)
  assert tiny.by_request(finished) == _unmoved()[0]


def test_a_parcel_outlives_what_happens_at_its_source():
  source, target = _far()
  source.submit(_REQUESTS)
  finished = source.step()
  parcels = source.extract(_NAMES)
  assert all(isinstance(p.kv.keys, jax.Array) for p in parcels if p.kv)
  source.forget(_NAMES)
  # Others take the pages before the parcels arrive.
  tiny.run(source, _REQUESTS)
  target.restore(parcels)
  finished += tiny.run(target)
  assert tiny.by_request(finished) == _unmoved()[0]
