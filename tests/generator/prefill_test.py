import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.generator import prefill
from dora_jax.generator.attention import xla
from tests.generator import tiny

# A block is 8 tokens, or 2 pages, where a chunk is no more.
_CHUNK = 8
_SETTINGS = {"stop_ids": (), "prefill_chunk": _CHUNK}


def _long(group_id=1, member=0, **changes):
  """A request whose prompt takes 6 chunks, the last of 3 tokens."""
  settings = {"length": 5 * _CHUNK + 4, "max_new_tokens": 6}
  return tiny.make_request(group_id, member, **(settings | changes))


def _fresh():
  return tiny.make_lane(**_SETTINGS)


@functools.cache
def _unhindered():
  """What becomes of some requests where nothing happens to them."""
  requests = [*(_long(1, m) for m in range(3)), _long(2, length=30)]
  return tiny.by_request(tiny.run(_fresh(), requests))


def _assert_undone(finished, *lanes):
  for row in tiny.by_request(finished).items():
    assert row in _unhindered().items()
  assert not any(lane._pool.allocator.num_used for lane in lanes)


def test_sizes_by_hand():
  sizes = functools.partial(
    prefill.choose_sizes, page_size=16, max_length=1000, platform="cpu"
  )
  # A table holds 1000 tokens, or 63 pages, in whole blocks.
  assert sizes(prefill_chunk=512) == prefill.Sizes(
    block_pages=4, pass_blocks=1, call_passes=8, table_width=64, shortens=True
  )
  assert sizes(prefill_chunk=500).call_blocks == 7
  assert sizes(prefill_chunk=63).block_pages == 3
  assert sizes(prefill_chunk=63).table_width == 63
  assert sizes(prefill_chunk=200, page_size=128).block_pages == 1
  on_gpu = sizes(prefill_chunk=512, platform="gpu")
  assert (on_gpu.pass_blocks, on_gpu.call_passes) == (4, 2)
  assert sizes(prefill_chunk=128, platform="gpu").pass_blocks == 2


def test_who_decodes_waits_for_one_chunk_of_a_long_prompt_at_most():
  lane = _fresh()
  lane.submit([tiny.make_request(7, length=2, max_new_tokens=60)])
  lane.step()
  lane.submit([_long()])
  before, started = lane.counters.prefilled_tokens, 1
  while lane._slots.num_running() == 1:
    decoded = lane.counters.decoded_tokens
    lane.step()
    assert lane.num_waiting() == 0 and lane.can_advance()
    new = lane.counters.prefilled_tokens - before
    assert new == min(_CHUNK * started, 5 * _CHUNK + 3)
    assert lane.counters.decoded_tokens - decoded >= 3
    started += 1
  assert started == 7
  _assert_undone([t for t in tiny.run(lane) if t.group_id == 1], lane)


def test_who_decodes_nobody_yet_fills_its_slots_first():
  lane = _fresh()
  lane.submit([_long(1, 0), _long(2, length=30)])
  before = lane.counters.decoded_tokens
  # 6 chunks and 4.
  for _ in range(9):
    assert lane.step() == [] and lane.counters.decoded_tokens == before
  lane.step()
  assert lane.counters.decoded_tokens == before + 2 * 3
  _assert_undone(tiny.run(lane), lane)


def test_neither_chunks_nor_what_is_found_change_a_bit():
  prompts = [tiny.make_prompt(1, 90) for _ in range(4)]
  for length, prompt in zip((30, 63, 70), prompts[1:], strict=True):
    prompt[length:] = tiny.make_prompt(length, 90 - length)
  requests = [
    tiny.make_request(group_id, prompt=prompt)
    for group_id, prompt in enumerate(prompts)
  ]
  # The first one's 89 tokens are two blocks, of which the last one finds one.
  calls = {}
  for chunk in (64, 512):
    lane = tiny.make_lane(prefill_chunk=chunk)
    calls[chunk] = tiny.by_request(tiny.run(lane, requests))
    assert lane.counters.found_tokens == 64
    assert lane.counters.prefilled_tokens == 4 * 89 - 64
    # Now all are found but the last page, and their second block is computed.
    assert tiny.by_request(tiny.run(lane, requests[::-1])) == calls[chunk]
    assert lane.counters.found_tokens == 5 * 64
  assert calls[64] == calls[512]
  tiny.assert_close(
    tiny.run(lane, requests), map(tiny.generate_slowly, requests)
  )


def test_nothing_is_found_of_a_version_that_is_not_served_any_more():
  lanes = tiny.make_lanes(1, lanes=[(0, 2), (1, 2)], **_SETTINGS)
  request = _long(version=1)
  allocator = lanes[0]._pool.allocator
  expected = tiny.by_request(tiny.run(lanes[0], [request]))
  # The other lane serves it too, so what was made for it stays.
  lanes[0].load(2, tiny.make_params(2))
  assert tiny.by_request(tiny.run(lanes[1], [request])) == expected
  assert lanes[1].counters.found_tokens == 5 * _CHUNK
  tiny.run(lanes[0], [_long(version=2)])
  assert lanes[0].counters.found_tokens == 0
  lanes[1].unload()
  assert {version for version, _ in allocator._by_key} == {2}
  lanes[0].load(1, tiny.make_params(1))
  assert not allocator._by_key
  assert tiny.by_request(tiny.run(lanes[0], [request])) == expected
  assert lanes[0].counters.found_tokens == 0


def test_a_prompt_is_prefilled_once_for_its_group_and_for_who_comes_later():
  lane = _fresh()
  before = lane.counters.prefilled_tokens
  num_found = lane.counters.found_tokens
  members = [_long(1, member) for member in range(3)]
  finished = tiny.run(lane, members)
  assert lane.counters.prefilled_tokens - before == 43
  assert lane.counters.found_tokens - num_found == 2 * 43
  # None is live any more: the last block, of 3 tokens, is lost.
  finished += tiny.run(lane, [_long(1, 0)])
  assert lane.counters.prefilled_tokens - before == 43 + 3
  _assert_undone(finished, lane)


# After 6 chunks they decode: then a refresh computes by prefill what had been
# decoded, which is not the same bit by bit.
@pytest.mark.parametrize(
  ("what", "num_chunks"),
  [(w, n) for w in ("spill", "cancel", "extract") for n in (0, 1, 5, 6)]
  + [("refresh", 0), ("refresh", 3)],
)
def test_who_is_half_prefilled_goes_back_and_loses_nothing(what, num_chunks):
  lane = _fresh()
  lane.submit([_long(1, 0), _long(1, 1)])
  before = lane.counters.prefilled_tokens
  for _ in range(num_chunks):
    lane.step()
  names = [(1, 0), (1, 1)]
  if what == "spill":
    lane.spill(names)
    assert lane._pool.allocator.num_used == 0
  elif what == "cancel":
    assert len(lane.cancel(names[:1])) == 1
  elif what == "extract":
    assert len(lane.extract(names)) == 2
    assert lane.step() == [] and lane.num_live() == 2
    lane.resume(names)
  else:
    lane.refresh(0, tiny.make_params(0))
  finished = tiny.run(lane)
  assert len(finished) == (1 if what == "cancel" else 2)
  _assert_undone(finished, lane)
  if what != "refresh":
    # A live member is all that a copy of the last 3 tokens can come from.
    computed = lane.counters.prefilled_tokens - before
    assert computed in (43, 43 + 3)


def test_who_is_half_prefilled_can_move_on():
  near, far = _fresh(), tiny.make_lane(first=1, lanes=[(5, 4)], **_SETTINGS)
  near.submit([_long(1, 0), _long(1, 1)])
  near.step()
  with pytest.raises(RuntimeError, match=r"Member 0 of group 1.*not paused"):
    near.forget([(1, 0)])
  parcels = near.extract([(1, 0)])
  assert parcels[0].kv is None and parcels[0].claim is None
  far.restore(parcels)
  near.forget([(1, 0)])
  with pytest.raises(ValueError, match="is there already"):
    far.restore(parcels)
  finished = tiny.run(far) + tiny.run(near)
  assert len(finished) == 2
  _assert_undone(finished, near, far)


def test_an_older_lane_gets_the_pages_of_who_is_half_prefilled():
  worker = tiny.make_worker(lanes=[(2, 2), (1, 2)], num_pages=26, **_SETTINGS)
  new_lane, old_lane = worker.lanes
  for lane in worker.lanes:
    lane.load(lane.generator_id, tiny.make_params(lane.generator_id))
  new_lane.submit([_long(3, version=2)])
  worker.step()
  old_lane.submit([_long(4, version=1, max_new_tokens=50)])
  worker.step()
  assert new_lane.num_waiting() == 1 and old_lane.num_waiting() == 0
  finished = []
  while worker.can_advance():
    finished += [t for _, made in worker.step() for t in made]
  assert [t.group_id for t in finished] == [4, 3]


def test_blocks_of_one_pass_equal_blocks_one_by_one():
  """As on accelerators, and for short prompts on CPUs."""
  lengths = (75, 40, 8, 5, 3)
  tokens = [tiny.make_prompt(*each) for each in enumerate(lengths)]
  ends = (1, 21, 31, 33, 35, 36)
  page_ids = [list(range(*each)) for each in itertools.pairwise(ends)]
  blocks = [
    prefill.Block(
      tokens=tokens[row][start : start + 16],
      start=start,
      page_ids=page_ids[row][: start // 4],
      filled=page_ids[row][start // 4 : start // 4 + 4],
    )
    for row, length in enumerate(lengths)
    for start in range(0, length, 16)
  ]
  compiled = jax.jit(
    functools.partial(
      prefill.prefill, config=tiny.CONFIG, paged=xla.XlaAttention()
    )
  )
  made = []
  for pass_blocks, call_passes, shortens in (
    (1, 11, False),
    (3, 4, False),
    (1, 11, True),
  ):
    sizes = prefill.Sizes(
      block_pages=4,
      pass_blocks=pass_blocks,
      call_passes=call_passes,
      table_width=28,
      shortens=shortens,
    )
    pool = xla.XlaAttention().create_pool(
      tiny.CONFIG,
      mesh=tiny.make_mesh(),
      num_pages=36,
      page_size=4,
      dtype=jnp.float32,
    )
    # What was left in the pages must not show.
    pool = jax.tree.map(lambda kv: jnp.full_like(kv, jnp.nan), pool)
    calls = prefill.gather(blocks, sizes=sizes, page_size=4)
    assert len(calls) == 1 + shortens
    for call in jax.device_put(calls):
      pool = compiled(tiny.make_params(0), pool, call)
    # All pages but one that the first sequence has not reached.
    filled = [*range(1, 20), *range(21, 36)]
    keys, values = np.array(pool.keys), np.array(pool.values)
    # What lies past the end of a sequence means nothing.
    for page, used in ((19, 3), (34, 1), (35, 3)):
      keys[:, page, ..., used:] = 0
      values[:, page, :, used:] = 0
    made.append([kv[:, filled] for kv in (keys, values)])
  for one_by_one, at_once, short in zip(*made, strict=True):
    assert np.isfinite(one_by_one).all()
    np.testing.assert_allclose(one_by_one, at_once, atol=2e-6)
    # A CPU relies on this.
    np.testing.assert_array_equal(one_by_one, short)
