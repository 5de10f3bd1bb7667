"""The host a chunk behind the mesh: everything is the same, only later."""

import functools

import jax
import numpy as np
import pytest

from dora_jax.generator import engine as engine_lib
from dora_jax.generator import verbs
from tests.generator import tiny

# Two that only the host can see, and none.
_ENDS = [
  {"stop_strings": ("B", "X", "c")},
  {"repeated_tokens": 2, "repetitions": 2, "temperature": 0.5},
  {},
]


def _make_request(group_id):
  """Limits of 1, of a chunk of 3, and more."""
  changes = {
    "length": 1 + (5 * group_id) % 23,
    "max_new_tokens": 1 + (7 * group_id) % 19,
    **_ENDS[group_id % 3],
  }
  return tiny.make_request(group_id, **changes)


_REQUESTS = [_make_request(group_id) for group_id in range(24)]
_NAMES = [(request.group_id, request.member) for request in _REQUESTS]


@functools.cache
def _expected():
  return tiny.by_request(tiny.run(tiny.make_lane(), _REQUESTS))


@pytest.mark.parametrize("chunks_ahead", [1, 2])
def test_a_host_that_is_behind_reads_the_same(chunks_ahead):
  lane = tiny.make_lane(chunks_ahead=chunks_ahead)
  lane.submit(_REQUESTS)
  finished = []
  num_under_way = set()
  while lane.can_advance():
    finished += lane.step()
    num_under_way.add(len(lane._flights))
  assert tiny.by_request(finished) == _expected()
  assert num_under_way == set(range(chunks_ahead + 1))
  assert lane.num_live() == 0 and lane._pool.allocator.num_used == 0
  assert not lane._slots.live
  # What the host alone has ended ran on, and was cut.
  assert lane.counters.cut_tokens > 0
  decoded = sum(len(t.completion) for t in finished)
  assert lane.counters.decoded_tokens == decoded
  lane.load(1, tiny.make_params(1))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_meanwhile_waits_for_the_chunk_under_way(seed):
  rng = np.random.default_rng(seed)
  source, target = tiny.make_lanes(lanes=[(0, 4), (1, 4)], chunks_ahead=1)
  lanes = [source, target]
  source.submit(_REQUESTS)
  finished = []
  cancelled = set()
  while any(lane.can_advance() for lane in lanes):
    for lane in lanes:
      finished += lane.step()
    names = [_NAMES[i] for i in rng.integers(0, len(_NAMES), 3)]
    match rng.integers(0, 8):
      case 0:
        source.spill(names)
      case 1:
        parcels = source.extract(names, copies_kv=bool(rng.integers(0, 2)))
        target.restore(parcels)
        source.forget(names)
      case 2:
        target.extract(names)
        target.resume(names)
      case 3 if len(cancelled) < 3:
        gone = source.cancel(names[:1]) + target.cancel(names[:1])
        cancelled |= {(group_id, member) for group_id, member, _ in gone}
  assert all(lane.num_live() == 0 for lane in lanes)
  assert source._pool.allocator.num_used == 0
  assert tiny.by_request(finished) == {
    name: row for name, row in _expected().items() if name not in cancelled
  }


def test_a_chunk_ends_early_for_one_who_waits_and_for_nobody_else():
  limits = (2, 12, 5)
  lane = tiny.make_lane(lanes=[(0, 2)], chunk_steps=16, stop_ids=())
  lane.submit(
    [
      tiny.make_request(group_id, max_new_tokens=limit)
      for group_id, limit in enumerate(limits)
    ]
  )
  assert [t.group_id for t in lane.step()] == [0]
  assert lane.counters.decoded_tokens == 2 * 2
  assert [t.group_id for t in lane.step()] == [1, 2]
  assert lane.counters.decoded_tokens == sum(limits)


def test_after_the_first_requests_nothing_is_traced_again(monkeypatch):
  traced = []

  def count(name):
    verb = getattr(verbs, name)

    @functools.wraps(verb)
    def counted(*args, **kwargs):
      traced.append(name)
      return verb(*args, **kwargs)

    monkeypatch.setattr(verbs, name, counted)

  for name in ("decode", "insert", "create_slots", "switch"):
    count(name)
  engine_lib.jit_verbs.cache_clear()
  jax.clear_caches()
  lane = tiny.make_lane(chunks_ahead=1)
  tiny.run(lane, _REQUESTS[:2])
  lane.submit(_REQUESTS[2:4])
  lane.step()
  lane.spill(_NAMES[2:4])
  tiny.run(lane)
  assert sorted(set(traced)) == ["create_slots", "decode", "insert", "switch"]
  warm = len(traced)
  lane.load(1, tiny.make_params(1))
  lane.load(0, tiny.make_params(0))
  finished = tiny.run(lane, _REQUESTS)
  lane.submit(_REQUESTS[:5])
  lane.spill(_NAMES[:3])
  tiny.run(lane)
  assert tiny.by_request(finished) == _expected()
  assert traced[warm:] == []
  engine_lib.jit_verbs.cache_clear()
