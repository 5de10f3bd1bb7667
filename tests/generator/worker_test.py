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
    ({"stop_ids": (3, 40)}, r"\[40\].*40 tokens.*config\.tokenizer\.stop_ids"),
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
  for kv in dataclasses.astuple(worker._pool.kv):
    (shard_shape,) = {s.data.shape for s in kv.addressable_shards}
    assert shard_shape[2] * 2 == tiny.CONFIG.num_kv_heads


def _uncrowded(requests):
  """What lanes with pages enough make of them, by version and request."""
  made = {}
  for version in {request.version for request in requests}:
    lane = tiny.make_lane(version, lanes=[(0, 3)], stop_ids=())
    mine = [request for request in requests if request.version == version]
    rows = tiny.by_request(tiny.run(lane, mine))
    made |= {(version, *name): row for name, row in rows.items()}
  return made


def _crowded(*versions, num_pages):
  """A worker with a lane for each version, and pages for few requests."""
  worker = tiny.make_worker(
    lanes=[(version, 3) for version in versions],
    num_pages=num_pages,
    stop_ids=(),
    max_length=40,
  )
  for lane in worker.lanes:
    lane.load(lane.generator_id, tiny.make_params(lane.generator_id))
  return worker


def _finish(worker, finished=()):
  """Steps until nothing is live; (version, group, member) -> what it made."""
  made = list(finished)
  for _ in range(500):
    if not any(lane.num_live() for lane in worker.lanes):
      break
    assert worker.can_advance()
    for _, trajectories in worker.step():
      made += trajectories
  assert not any(lane.num_live() for lane in worker.lanes)
  assert worker.pages_in_use == 0
  return {
    (t.version, t.group_id, t.member): row
    for t in made
    for row in tiny.by_request([t]).values()
  }


def test_a_newer_version_makes_room_for_an_older_one():
  # A request takes 9 pages, of which 2 are its group's; the pool has 25.
  settings = {"length": 9, "max_new_tokens": 28}
  older = [
    tiny.make_request(group_id, version=1, **settings) for group_id in (4, 5)
  ]
  newer = [
    tiny.make_request(6, member, version=2, **settings) for member in range(3)
  ]
  # The newer one is the first lane, so that order alone does not help.
  worker = _crowded(2, 1, num_pages=26)
  new_lane, old_lane = worker.lanes
  new_lane.submit(newer)
  worker.step()
  assert worker.pages_in_use == 2 + 3 * 7
  old_lane.submit(older)
  worker.step()
  # 9 pages are needed and 2 are free: the last member's 7 make it.
  assert new_lane.counters.spilled == 1
  assert old_lane.num_waiting() == 1 and new_lane.num_waiting() == 1
  worker.step()
  # The next one needs 9 again. The last of a group gives its pages back too.
  assert new_lane.counters.spilled == 3 and new_lane.num_waiting() == 3
  assert old_lane.num_waiting() == 0 and old_lane.counters.spilled == 0
  made = _finish(worker)
  assert list(made)[:2] == [(1, 4, 0), (1, 5, 0)]
  assert made == _uncrowded(older + newer)
  assert new_lane.counters.spilled == 3
  assert new_lane.counters.reprefilled_tokens == 0


@pytest.mark.parametrize("seed", range(3))
def test_crowded_lanes_finish_everything_and_lose_not_a_bit(seed):
  rng = np.random.default_rng(seed)
  worker = _crowded(3, 1, 2, num_pages=24)
  requests = [
    tiny.make_request(
      index // 2,
      index % 2,
      version=int(rng.integers(1, 4)),
      length=int(rng.integers(1, 12)),
      max_new_tokens=int(rng.integers(1, 28)),
    )
    for index in range(24)
  ]
  lanes = {lane.version: lane for lane in worker.lanes}
  finished = []
  for request in requests:
    lanes[request.version].submit([request])
    for _, trajectories in worker.step():
      finished += trajectories
  assert _finish(worker, finished) == _uncrowded(requests)
  spilled = [lanes[version].counters.spilled for version in (1, 2, 3)]
  assert spilled[0] == 0 and sum(spilled) > 0
  assert not any(lane.counters.reprefilled_tokens for lane in worker.lanes)


def test_who_is_evaluated_neither_makes_room_nor_asks_for_it():
  settings = {"length": 9, "max_new_tokens": 28}
  worker = _crowded(1, 2, num_pages=12)
  old_lane, new_lane = worker.lanes
  evaluated = tiny.make_request(0, version=2, stream=1, **settings)
  new_lane.submit([evaluated])
  worker.step()
  old_lane.submit([tiny.make_request(0, version=1, **settings)])
  worker.step()
  assert new_lane.counters.spilled == 0 and old_lane.num_waiting() == 1
  made = _finish(worker)
  assert list(made) == [(2, 0, 0), (1, 0, 0)]
  new_lane.submit([tiny.make_request(0, version=2, **settings)])
  worker.step()
  old_lane.submit([tiny.make_request(0, version=1, stream=1, **settings)])
  worker.step()
  assert new_lane.counters.spilled == 0 and old_lane.num_waiting() == 1
  _finish(worker)


def test_a_paused_request_keeps_its_pages_while_an_older_one_waits():
  settings = {"length": 9, "max_new_tokens": 28}
  worker = _crowded(1, 2, num_pages=12)
  old_lane, new_lane = worker.lanes
  new_lane.submit([tiny.make_request(0, version=2, **settings)])
  worker.step()
  new_lane.extract([(0, 0)])
  old_lane.submit([tiny.make_request(1, version=1, **settings)])
  new_lane.submit([tiny.make_request(2, version=2, length=1)])
  # Nothing runs, and 2 pages are free, which the newer lane must not take.
  assert not worker.can_advance()
  assert worker.step() == [] and new_lane.counters.spilled == 0
  new_lane.resume([(0, 0)])
  made = _finish(worker)
  assert next(iter(made)) == (1, 1, 0) and len(made) == 3
