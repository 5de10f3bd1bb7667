"""Zero tokens are prefilled again on moves; a refresh counts each one that is.

The price of partial rollout is every live request's KV at each new version; the
price of a move is a copy, or between lanes of one mesh not even that.
"""

import numpy as np
import pytest

from tests.generator import tiny

_GROUP = [
  tiny.make_request(1, member, length=11, max_new_tokens=12)
  for member in range(4)
]
_NAMES = [(1, member) for member in range(4)]
_SETTINGS = {"stop_ids": (), "chunk_steps": 3}


def _settle(source, target, names, *, copies_kv):
  parcels = source.extract(names, copies_kv=copies_kv)
  num_kv_tokens = target.restore(parcels)
  source.forget(names)
  return num_kv_tokens


def test_a_group_that_moves_shares_its_prompt_again():
  source = tiny.make_lane(lanes=[(0, 4)], **_SETTINGS)
  target = tiny.make_lane(lanes=[(5, 4)], first=3, **_SETTINGS)
  source.submit(_GROUP)
  source.step()
  pages_before = source._pool.allocator.num_used
  # 10 prompt tokens have KV before the first chunk, 3 more for each of its.
  assert _settle(source, target, _NAMES[:3], copies_kv=True) == 3 * 13
  target.step()
  assert _settle(source, target, _NAMES[3:], copies_kv=True) == 13
  target.step()
  assert target._pool.allocator.num_used == pages_before == 2 + 4 * 4
  assert source._pool.allocator.num_used == 0
  assert source.counters.prefilled_tokens == 10
  assert target.counters.prefilled_tokens == 0
  assert target.counters.moved_in_tokens == 4 * 13
  assert (target.counters.moved_in, source.counters.moved_out) == (4, 4)
  # A member that comes later finds the prompt as well.
  target.submit([tiny.make_request(1, 9, length=11, max_new_tokens=12)])
  finished = tiny.by_request(tiny.run(target))
  assert target.counters.prefilled_tokens == 0
  assert target.counters.shared_prompts == 1
  alone = tiny.run(
    source, [tiny.make_request(1, 9, length=11, max_new_tokens=12)]
  )
  assert tiny.by_request(alone).items() <= finished.items()


def test_lanes_of_one_mesh_hand_pages_over():
  source, target = tiny.make_lanes(lanes=[(0, 4), (1, 4)], **_SETTINGS)
  source.submit(_GROUP)
  source.step()
  allocator = source._pool.allocator
  before = {
    slot: live.claim.page_ids for slot, live in source._slots.live.items()
  }
  _settle(source, target, _NAMES, copies_kv=False)
  target.step()
  after = {
    slot: live.claim.page_ids for slot, live in target._slots.live.items()
  }
  assert after == before and allocator.num_used == 2 + 4 * 4
  assert source.counters.prefilled_tokens == 10
  assert target.counters.prefilled_tokens == 0
  tiny.run(target)
  assert allocator.num_used == 0


def test_pages_that_are_gone_are_not_taken_over():
  source, target = tiny.make_lanes(lanes=[(0, 4), (1, 4)], **_SETTINGS)
  far = tiny.make_lane(lanes=[(5, 4)], first=3, **_SETTINGS)
  source.submit(_GROUP)
  source.step()
  parcels = source.extract(_NAMES, copies_kv=False)
  with pytest.raises(ValueError, match="pages of another mesh"):
    far.restore(parcels)
  assert source.cancel([(1, 2), (7, 7)]) == [(1, 2, 3)]
  with pytest.raises(ValueError, match=r"Member 2 .* released meanwhile"):
    target.restore(parcels)
  assert target.num_live() == 0
  target.restore([parcel for parcel in parcels if parcel.name != (1, 2)])
  with pytest.raises(ValueError, match="is there already"):
    target.restore(parcels[:1])
  source.forget(_NAMES)  # who was cancelled meanwhile is no error
  assert len(tiny.run(target)) == 3
  assert source._pool.allocator.num_used == 0


def test_each_token_prefilled_again_by_a_refresh_is_counted():
  lane = tiny.make_lane(lanes=[(0, 3)], **_SETTINGS)
  lane.submit(_GROUP)
  lane.step()
  lane.step()
  # Members 0 to 2 have KV of 10 + 6 tokens each; member 3 waits without any.
  assert lane.live_tokens() == 3 * 16
  assert lane.refresh(1, tiny.make_params(1)) == 3 * 16
  assert lane.counters.reprefilled_tokens == 3 * 16
  finished = tiny.run(lane)
  assert lane.counters.prefilled_tokens == 2 * 10
  assert [t.token_versions.tolist() for t in finished] == [
    *3 * [6 * [0] + 6 * [1]],
    12 * [1],
  ]
  assert {t.version for t in finished} == {0}
  assert np.array_equal(finished[0].prompt, _GROUP[0].prompt)
