import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax import interfaces, types
from tests.generator import tiny


@functools.cache
def _requests() -> tuple[types.Request, ...]:
  """All that may go wrong by one: pages of 4 and 16, rows of 64, one token."""
  lengths = [1, 2, 3, 4, 5, 15, 16, 17, 18, 60, 63, 64, 65, 66, 90]
  temperatures = [0.0, 0.6, 1.0, 1.5]
  singles = [
    tiny.make_request(
      group_id,
      length=length,
      temperature=temperatures[group_id % 4],
      max_new_tokens=1 + (7 * group_id) % 10,
    )
    for group_id, length in enumerate(lengths)
  ]
  groups = [
    tiny.make_request(100 + length, member, length=length)
    for length in (6, 8)
    for member in range(3)
  ]
  return (*singles, *groups, tiny.make_request(100, stream=1))


@functools.cache
def _slow():
  return [tiny.generate_slowly(request) for request in _requests()]


@functools.cache
def _lane():
  """One lane for many tests: none of them may leave anything behind."""
  return tiny.make_lane()


@functools.cache
def _fast():
  return tiny.by_request(tiny.run(_lane(), _requests()))


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"lanes": [(0, 1)], "chunk_steps": 1, "page_size": 3},
    {"lanes": [(0, 8)], "chunk_steps": 8, "page_size": 128},
    {"tensor": 2},
  ],
  ids=str,
)
def test_equals_a_full_forward_pass_for_each_token(changes):
  lane = tiny.make_lane(**changes)
  tiny.assert_close(tiny.run(lane, _requests()), _slow())
  assert lane._pool.allocator.num_used == 0


def test_logprobs_are_of_the_distribution_sampled_from():
  for trajectory in tiny.run(_lane(), _requests()):
    (temperature,) = {
      request.sampling.temperature
      for request in _requests()
      if request.group_id == trajectory.group_id
    }
    tokens = [*trajectory.prompt, *trajectory.completion]
    logits_TV = tiny.full_logits(tiny.make_params(0), tiny.pad(tokens))
    scaled_TV = np.asarray(logits_TV, np.float64) / (temperature or 1.0)
    logprobs_TV = scaled_TV - np.log(np.exp(scaled_TV).sum(-1, keepdims=True))
    before_T = np.arange(len(trajectory.prompt), len(tokens)) - 1
    np.testing.assert_allclose(
      trajectory.behavior_logprobs,
      logprobs_TV[before_T, trajectory.completion],
      atol=1e-5,
    )


def test_lengths_agree_and_completions_end_with_a_stop_or_at_the_limit():
  limits = {
    (r.stream, r.group_id, r.member): r.max_new_tokens for r in _requests()
  }
  reasons = set()
  for trajectory in tiny.run(_lane(), _requests()[:-1]):
    completion = trajectory.completion.tolist()
    limit = limits[0, trajectory.group_id, trajectory.member]
    assert len(trajectory.behavior_logprobs) == len(completion)
    assert trajectory.token_versions.tolist() == [0] * len(completion)
    assert not set(completion[:-1]) & set(tiny.STOP_IDS)
    stopped = completion[-1] in tiny.STOP_IDS
    assert trajectory.finish_reason == ("stop" if stopped else "length")
    assert stopped or len(completion) == limit
    reasons.add(trajectory.finish_reason)
  assert reasons == {"stop", "length"}


def test_the_company_and_the_order_of_arrival_change_not_a_bit():
  lane = _lane()
  for request in _requests():
    alone = tiny.by_request(tiny.run(lane, [request]))
    assert alone.items() <= _fast().items()
  assert tiny.by_request(tiny.run(lane, _requests()[::-1])) == _fast()
  finished = []
  for request in _requests():
    lane.submit([request])
    finished += lane.step()
  assert tiny.by_request(finished + tiny.run(lane)) == _fast()


def test_the_size_of_chunks_changes_not_a_bit():
  lane = tiny.make_lane(chunk_steps=8)
  assert tiny.by_request(tiny.run(lane, _requests())) == _fast()


def test_a_prompt_is_prefilled_once_while_a_member_lives():
  lane = tiny.make_lane(stop_ids=())
  length = 11
  members = [
    tiny.make_request(1, member, length=length, max_new_tokens=4 + 2 * member)
    for member in range(5)
  ]
  finished = []
  lane.submit(members[:2])
  finished += lane.step()
  lane.submit(members[2:4])
  finished += lane.step()  # member 0 leaves
  lane.submit(members[4:])
  finished += tiny.run(lane)
  assert lane.counters.prefilled_tokens == length - 1
  assert lane.counters.shared_prompts == 4
  for member in members:
    (alone,) = tiny.run(lane, [member])
    assert tiny.by_request([alone]).items() <= tiny.by_request(finished).items()
  assert lane.counters.prefilled_tokens == 6 * (length - 1)


def test_a_pool_with_room_for_one_serves_all_in_turn():
  lane = tiny.make_lane()
  allocator = lane._pool.allocator
  others = allocator.alloc(allocator.num_free - tiny.MAX_LENGTH // 4)
  assert tiny.by_request(tiny.run(lane, _requests())) == _fast()
  assert allocator.num_used == len(others)


def test_what_others_left_in_the_pages_does_not_matter():
  lane = tiny.make_lane()
  lane._pool.kv = jax.tree.map(
    lambda kv: jax.device_put(jnp.full_like(kv, jnp.nan), kv.sharding),
    lane._pool.kv,
  )
  assert tiny.by_request(tiny.run(lane, _requests())) == _fast()


def test_many_loads_equal_a_fresh_lane():
  lane = _lane()
  fresh = {}
  for cycle in range(10):
    version = cycle % 3
    requests = [
      tiny.make_request(group_id, version=version) for group_id in range(3)
    ]
    lane.load(version, tiny.make_params(version))
    finished = tiny.by_request(tiny.run(lane, requests))
    if version not in fresh:
      slow = [tiny.generate_slowly(request) for request in requests]
      tiny.assert_close(tiny.run(lane, requests), slow)
      fresh[version] = finished
    assert finished == fresh[version]
  assert fresh[0] != fresh[1] != fresh[2]
  lane.load(0, tiny.make_params(0))
  assert tiny.by_request(tiny.run(lane, _requests())) == _fast()


def test_nothing_is_compiled_after_the_first_of_each_length_bucket():
  lane = tiny.make_lane()
  tiny.run(lane, [tiny.make_request(0, 0, length=n) for n in (2, 70)])
  compiled = []

  def listen(event, duration_secs, **_):
    if event == "/jax/core/compile/backend_compile_duration":
      compiled.append(duration_secs)

  jax.monitoring.register_event_duration_secs_listener(listen)
  tiny.run(lane, _requests())
  lane.load(5, tiny.make_params(1))
  tiny.run(lane, [tiny.make_request(0, 0, version=5)])
  jax.monitoring.unregister_event_duration_listener(listen)
  assert not compiled


def test_score_equals_a_full_forward_pass():
  lane = _lane()
  for length in (2, 64, 65, tiny.MAX_LENGTH):
    tokens = tiny.make_prompt(0, length)
    logits_TV = tiny.full_logits(tiny.make_params(0), tiny.pad(tokens))
    logprobs_TV = np.asarray(jax.nn.log_softmax(logits_TV))
    expected_T = logprobs_TV[np.arange(length - 1), tokens[1:]]
    np.testing.assert_allclose(lane.score(tokens), expected_T, atol=1e-5)


def test_params_that_yield_nan_are_reported_with_the_request():
  lane = tiny.make_lane()
  params = tiny.make_params(0)
  lane.load(3, params | {"head": params["head"] * jnp.nan})
  with pytest.raises(FloatingPointError, match=r"Member 2 of group 8 .* 3"):
    tiny.run(lane, [tiny.make_request(8, 2, version=3)])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"version": 2}, "is of version 2 but generator 0 serves version 0"),
    ({"length": 0}, "empty prompt"),
    (
      {"length": 95, "max_new_tokens": 6},
      r"101 in all.*100 in all.*config\.generator\.max_length",
    ),
    ({"max_new_tokens": 0}, "at least 1"),
    ({"prompt": np.array([3, 40])}, r"from 3 to 40.*config\.model"),
    ({"temperature": -0.5}, r"-0\.5.*config\.generator\.temperature"),
  ],
)
def test_a_request_that_cannot_be_served_is_refused(changes, message):
  lane = _lane()
  with pytest.raises(ValueError, match=message):
    lane.submit([tiny.make_request(0), tiny.make_request(1, **changes)])
  assert lane.num_live() == 0


def test_load_is_refused_while_requests_are_live_or_params_elsewhere():
  lane = _lane()
  assert isinstance(lane, interfaces.Generator)
  lane.submit([tiny.make_request(0)])
  with pytest.raises(RuntimeError, match="version 0: 1 of its requests"):
    lane.unload()
  with pytest.raises(RuntimeError, match="version 1 while 1 requests of ver"):
    lane.load(1, tiny.make_params(1))
  tiny.run(lane)
  with pytest.raises(ValueError, match=r"version 1 is on .* mesh is"):
    lane.load(1, jax.device_put(tiny.make_params(1), jax.devices()[3]))
  assert lane.version == 0
  lane.unload()
  with pytest.raises(RuntimeError, match="no params loaded"):
    lane.score(tiny.make_prompt(0, 5))
  with pytest.raises(ValueError, match="serves version None"):
    lane.submit([tiny.make_request(0)])
  lane.load(0, tiny.make_params(0))
