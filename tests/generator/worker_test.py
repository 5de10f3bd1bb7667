import dataclasses

import jax
import numpy as np
import pytest

from tests.generator import tiny


def test_lanes_at_different_versions_share_a_mesh_and_do_not_mix():
  worker = tiny.make_worker(lanes=[(4, 4), (9, 4)], num_pages=101)
  requests = {}
  for lane, version in zip(worker.lanes, (1, 2), strict=True):
    lane.load(version, tiny.make_params(version))
    requests[lane.generator_id] = [
      tiny.make_request(group_id, member, version=version)
      for group_id in range(2)
      for member in range(3)
    ]
    lane.submit(requests[lane.generator_id])
  finished = {4: [], 9: []}
  most_pages = 0
  while any(lane.num_live() for lane in worker.lanes):
    for generator_id, trajectories in worker.step():
      finished[generator_id] += trajectories
    most_pages = max(most_pages, worker.pages_in_use)
  for generator_id, version in ((4, 1), (9, 2)):
    slow = [tiny.generate_slowly(r) for r in requests[generator_id]]
    tiny.assert_close(finished[generator_id], slow)
    for trajectory in finished[generator_id]:
      assert set(trajectory.token_versions.tolist()) == {version}
  assert most_pages > 0
  assert worker.pages_in_use == 0
  assert worker.step() == []
  for lane in worker.lanes:
    counters = lane.counters
    completions = [t.completion for t in finished[lane.generator_id]]
    assert counters.decoded_tokens == sum(map(len, completions))
    assert counters.busy_slot_steps <= counters.total_slot_steps


def test_by_default_every_slot_can_reach_the_limit_at_once():
  worker = tiny.make_worker(lanes=[(0, 4), (1, 2)], page_size=3)
  assert worker.num_pages == (4 + 2) * 34  # 33 pages hold 99 of 100 tokens


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"stop_ids": (3, 40)}, r"\[40\].*40 tokens.*config\.generator\.stop_ids"),
    ({"max_length": 129}, r"129.*128.*config\.generator\.max_length"),
    ({"num_pages": 25}, r"25 pages.*need 26.*config\.generator\.num_pages"),
    ({"page_size": 0}, r"config\.generator\.page_size"),
    ({"chunk_steps": 0}, r"config\.generator\.chunk_steps"),
    ({"tensor": 4}, r"2 KV heads.*4 devices.*config\.mesh\.generator_tensor"),
    (
      {"mesh": jax.sharding.Mesh(np.array(jax.devices()[:2]), ("fsdp",))},
      "'tensor', not",
    ),
  ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    tiny.make_worker(**changes)


def test_the_pool_is_split_over_the_kv_heads():
  worker = tiny.make_worker(tensor=2)
  for kv_LJOKH in dataclasses.astuple(worker._pool.kv):
    (shard_shape,) = {s.data.shape for s in kv_LJOKH.addressable_shards}
    assert shard_shape[3] * 2 == tiny.CONFIG.num_kv_heads
