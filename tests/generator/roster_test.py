import dataclasses

import numpy as np
import pytest

from dora_jax.generator import pages
from tests.generator import tiny

_REQUESTS = [
  tiny.make_request(1, 0, length=9, max_new_tokens=12),
  tiny.make_request(1, 1, length=9, max_new_tokens=12),
  tiny.make_request(2, length=1, max_new_tokens=9, temperature=0.0),
  tiny.make_request(3, length=62, max_new_tokens=12),
]
_NAMES = [(r.group_id, r.member) for r in _REQUESTS]


def _split(finished):
  """(reason, tokens) by request, and log-probabilities by request."""
  made = tiny.by_request(finished)
  return (
    {name: row[:2] for name, row in made.items()},
    {name: row[2] for name, row in made.items()},
  )


def _kv(lane, live, num_tokens):
  """KV of the first positions of a live request, on the host."""
  num_pages = pages.num_pages_for(num_tokens, 4)
  page_ids = list(live.claim.page_ids[:num_pages])
  kv = lane._pool.kv
  by_position = [
    np.asarray(kv.keys)[:, page_ids].transpose(0, 1, 4, 2, 3),
    np.asarray(kv.values)[:, page_ids].transpose(0, 1, 3, 2, 4),
  ]
  return [
    pages_LCOKH.reshape(2, num_pages * 4, 2, 8)[:, :num_tokens]
    for pages_LCOKH in by_position
  ]


@pytest.mark.parametrize("num_slots", [4, 2])
def test_the_same_params_under_another_version_change_no_token(num_slots):
  expected, expected_logprobs = _split(tiny.run(tiny.make_lane(), _REQUESTS))
  lane = tiny.make_lane(lanes=[(0, num_slots)])
  lane.submit(_REQUESTS)
  finished = []
  for version in range(1, 4):
    finished += lane.step()
    lane.refresh(version, tiny.make_params(0))
  finished += tiny.run(lane)
  tokens, logprobs = _split(finished)
  assert tokens == expected
  for name, row in logprobs.items():
    np.testing.assert_allclose(row, expected_logprobs[name], atol=1e-5)
  versions = [t.token_versions for t in finished]
  assert all((np.diff(row) >= 0).all() for row in versions)
  assert max(len(set(row.tolist())) for row in versions) > 1
  assert lane._pool.allocator.num_used == 0


def test_the_kv_is_that_of_a_prompt_with_what_was_sampled():
  lane = tiny.make_lane(stop_ids=())
  lane.submit(_REQUESTS)
  lane.step()
  lane.refresh(2, tiny.make_params(2))
  fresh = tiny.make_lane(2, stop_ids=())
  for live in lane._slots.live.values():
    sequence = live.sequence()
    request = dataclasses.replace(live.request, prompt=sequence, version=2)
    fresh.submit([dataclasses.replace(request, max_new_tokens=4)])
    fresh.step()
    (same,) = fresh._slots.live.values()
    num_tokens = len(sequence) - 1
    for ours, theirs in zip(
      _kv(lane, live, num_tokens), _kv(fresh, same, num_tokens), strict=True
    ):
      assert ours.any() and np.array_equal(ours, theirs)
    tiny.run(fresh)


def test_what_is_paused_or_spilled_during_a_refresh_goes_on_after_it():
  lane = tiny.make_lane(lanes=[(0, 4)], stop_ids=())
  other = tiny.make_lane(lanes=[(1, 4)], stop_ids=(), first=2)
  lane.submit(_REQUESTS)
  finished = lane.step()
  parcels = lane.extract(_NAMES[:2])
  lane.spill(_NAMES[2:3])
  lane.refresh(1, tiny.make_params(1))
  assert [p.version for p in parcels] == [0, 0]
  # One is taken over where version 0 is served still, one comes back.
  other.restore(parcels[:1])
  lane.forget(_NAMES[:1])
  lane.resume(_NAMES[1:2])
  moved = tiny.run(other)
  unmoved = tiny.run(tiny.make_lane(stop_ids=()), _REQUESTS)
  assert tiny.by_request(moved).items() <= tiny.by_request(unmoved).items()
  finished += tiny.run(lane)
  versions = {
    (t.group_id, t.member): t.token_versions.tolist() for t in finished
  }
  assert versions == {
    (1, 1): 3 * [0] + 9 * [1],
    (2, 0): 3 * [0] + 6 * [1],
    (3, 0): 3 * [0] + 9 * [1],
  }
  # Members 1/1 and 3/0, and 2/0, whose KV on the host was no good any more.
  assert lane.counters.reprefilled_tokens == (8 + 3) + (0 + 3) + (61 + 3)
  assert lane._pool.allocator.num_used == other._pool.allocator.num_used == 0


def test_pages_shared_with_a_lane_of_another_version_are_left_alone():
  lanes = tiny.make_lanes(lanes=[(0, 4), (1, 4)], stop_ids=())
  lanes[0].submit(_REQUESTS)
  finished = lanes[0].step()
  # Members 0 and 1 of group 1 share a page of prompt, now between two lanes.
  lanes[1].restore(lanes[0].extract([(1, 1)], copies_kv=False))
  lanes[0].forget([(1, 1)])
  lanes[0].refresh(1, tiny.make_params(1))
  finished += tiny.run(lanes[0]) + tiny.run(lanes[1])
  moved = [t for t in finished if (t.group_id, t.member) == (1, 1)]
  unmoved = tiny.run(tiny.make_lane(stop_ids=()), _REQUESTS)
  assert tiny.by_request(moved).items() <= tiny.by_request(unmoved).items()
  assert len(finished) == 4 and lanes[0]._pool.allocator.num_used == 0


def test_tokens_of_other_versions_are_refused_unless_refreshed():
  lane = tiny.make_lane(stop_ids=())
  lane.submit(_REQUESTS)
  lane.step()
  served, _ = lane._loaded()
  # As if other params had been put under live requests.
  lane._served = dataclasses.replace(served, version=np.int32(1))
  with pytest.raises(RuntimeError, match=r"of that alone, but versions \[0, 1"):
    tiny.run(lane)


def test_an_older_version_is_no_refresh():
  lane = tiny.make_lane(2)
  with pytest.raises(ValueError, match=r"serves version 2.* to version 1"):
    lane.refresh(1, tiny.make_params(1))


def test_cancelled_requests_leave_nothing_behind():
  lane = tiny.make_lane(lanes=[(0, 3)], stop_ids=())
  expected = tiny.by_request(tiny.run(lane, _REQUESTS[2:]))
  lane.submit(_REQUESTS)
  finished = lane.step()
  lane.spill(_NAMES[1:2])
  # In a slot, on the host, waiting for the first time, and nowhere.
  assert lane.cancel([(1, 0), (1, 1), (8, 0)]) == [(1, 0, 3), (1, 1, 3)]
  assert lane.counters.cancelled == 2 and lane.num_live() == 2
  finished += tiny.run(lane)
  assert tiny.by_request(finished) == expected
  assert lane._pool.allocator.num_used == 0
  assert lane.cancel(_NAMES) == []
  lane.submit(_REQUESTS)
  lane.extract(_NAMES)
  assert lane.cancel(_NAMES) == [(*name, 0) for name in _NAMES]
  assert lane.num_live() == 0


def test_moves_in_the_wrong_order_are_refused():
  lane = tiny.make_lane(stop_ids=())
  lane.submit(_REQUESTS)
  lane.step()
  with pytest.raises(RuntimeError, match=r"Member 0 of group 2.*is not paused"):
    lane.forget([(2, 0)])
  lane.extract([(2, 0)])
  with pytest.raises(RuntimeError, match=r"Member 0 of group 2.*already"):
    lane.extract([(1, 0), (2, 0)])
  lane.resume(_NAMES)
  assert len(tiny.run(lane)) == 4
