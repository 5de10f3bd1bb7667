"""Requests with rules of their own: how they sample, and what ends them."""

import dataclasses
import functools

import numpy as np
import pytest

from dora_jax import types
from tests.generator import tiny

_SAMPLING = [
  {"top_k": 5},
  {"top_p": 0.7},
  {"min_p": 0.1, "temperature": 1.5},
  {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
  {"temperature": 0.0},
  {},
]
_STOPPING = [
  {"repeated_tokens": 2, "repetitions": 2},
  {"stop_ids": (5, 6, 7, 8, 20, 30)},
  # Of tokens 4 to 39, whose texts are "A" to "d".
  {"stop_strings": ("B", "X", "c", "PQ")},
  {"stop_strings": ("FG", "R"), "repeated_tokens": 1, "repetitions": 2},
]


@functools.cache
def _requests() -> tuple[types.Request, ...]:
  return tuple(
    tiny.make_request(
      len(_STOPPING) * row + column,
      length=6,
      max_new_tokens=20,
      **rules,
      **ends,
    )
    for row, rules in enumerate(_SAMPLING)
    for column, ends in enumerate(_STOPPING)
  )


@functools.cache
def _slow():
  return [tiny.generate_slowly(request) for request in _requests()]


@functools.cache
def _fast():
  return tiny.by_request(tiny.run(tiny.make_lane(), _requests()))


def test_equals_a_full_forward_pass_and_a_look_after_each_token():
  lane = tiny.make_lane()
  finished = tiny.run(lane, _requests())
  tiny.assert_close(finished, _slow())
  counts = {
    reason: sum(t.finish_reason == reason for t in finished)
    for reason in ("stop", "repetition", "length")
  }
  assert min(counts.values()) > 1, counts
  ends = [int(t.completion[-1]) for t in finished if t.finish_reason == "stop"]
  assert sum(end in tiny.STOP_IDS for end in ends) < len(ends)
  assert lane.counters.decoded_tokens == sum(
    len(t.completion) for t in finished
  )
  assert lane.counters.cut_tokens > 0
  assert lane._pool.allocator.num_used == 0
  for trajectory in finished:
    lengths = {
      len(getattr(trajectory, field))
      for field in ("behavior_logprobs", "kept_mass", "token_versions")
    }
    assert lengths == {len(trajectory.completion)}


def test_chunks_and_company_change_not_a_bit():
  lane = tiny.make_lane(chunk_steps=8)
  assert tiny.by_request(tiny.run(lane, _requests()[::-1])) == _fast()
  for request in _requests()[::5]:
    alone = tiny.by_request(tiny.run(lane, [request]))
    assert alone.items() <= _fast().items()


def test_a_move_between_two_tokens_of_a_stop_string_changes_nothing():
  plain = tiny.make_request(50, max_new_tokens=12)
  lanes = tiny.make_lanes(lanes=[(0, 4), (1, 4)], stop_ids=())
  (whole,) = tiny.run(lanes[0], [plain])
  # The third token is the last of the first chunk, the fourth begins the next.
  string = tiny.decode_text(whole.completion[2:4])
  assert tiny.decode_text(whole.completion).index(string) == 2
  request = dataclasses.replace(
    plain, stopping=types.Stopping(stop_strings=("@", string))
  )
  for copies_kv in (True, False):
    lanes[0].submit([request])
    assert lanes[0].step() == []
    lanes[1].restore(lanes[0].extract([(50, 0)], copies_kv=copies_kv))
    lanes[0].forget([(50, 0)])
    (moved,) = tiny.run(lanes[1])
    assert moved.finish_reason == "stop"
    assert moved.completion.tolist() == whole.completion[:4].tolist()
    for field in ("behavior_logprobs", "kept_mass"):
      ours, theirs = getattr(moved, field), getattr(whole, field)
      assert ours.tolist() == theirs[:4].tolist()
  assert lanes[1].counters.cut_tokens == 2 * 2


def test_a_completion_may_stop_at_its_first_token():
  plain = tiny.make_request(51, max_new_tokens=12)
  lane = tiny.make_lane(stop_ids=())
  (whole,) = tiny.run(lane, [plain])
  first = whole.completion[:1]
  for stopping in (
    types.Stopping(stop_strings=(tiny.decode_text(first),)),
    types.Stopping(stop_ids=(int(first[0]),)),
  ):
    request = dataclasses.replace(plain, stopping=stopping)
    # The slot that it leaves goes on as if nothing had been in it.
    finished = tiny.run(lane, [request, plain])
    assert finished[0].completion.tolist() == first.tolist()
    assert finished[0].finish_reason == "stop"
    assert tiny.by_request(finished[1:]) == tiny.by_request([whole])
  assert lane._pool.allocator.num_used == 0


def test_kept_mass_leads_back_to_the_whole_distribution():
  for trajectory in tiny.run(tiny.make_lane(), _requests()):
    request = _requests()[trajectory.group_id]
    tokens = [*trajectory.prompt, *trajectory.completion]
    logits_TV = tiny.full_logits(tiny.make_params(0), tiny.pad(tokens))
    scaled_TV = np.asarray(logits_TV, np.float64)
    scaled_TV /= request.sampling.temperature or 1.0
    logprobs_TV = scaled_TV - np.log(np.exp(scaled_TV).sum(-1, keepdims=True))
    before_T = np.arange(len(trajectory.prompt), len(tokens)) - 1
    np.testing.assert_allclose(
      trajectory.behavior_logprobs + np.log(trajectory.kept_mass),
      logprobs_TV[before_T, trajectory.completion],
      atol=1e-5,
    )
    temperature = request.sampling.temperature
    is_plain = request.sampling == types.Sampling(temperature=temperature)
    assert (trajectory.kept_mass < 1).any() != is_plain


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"temperature": float("nan")}, r"nan; .*config\.generator\.temperature"),
    ({"top_k": -1}, r"top_k -1; .*at least 0: .*config\.generator\.top_k"),
    ({"top_p": 0.0}, r"top_p 0\.0; .*config\.generator\.top_p"),
    ({"min_p": 1.5}, r"min_p 1\.5; .*from 0 to 1.*config\.generator\.min_p"),
    ({"stop_ids": (40,)}, r"\[40\].*40 tokens.*config\.tokenizer\.stop_ids"),
    ({"stop_ids": tuple(range(9))}, r"9 stop tokens.*8.*config\.tokenizer"),
    ({"stop_strings": ("",)}, r"string ''.*config\.generator\.stop_strings"),
    ({"stop_strings": ("a\ufffd",)}, r"must not .*generator\.stop_strings"),
    (
      {"repeated_tokens": 2, "repetitions": 1},
      r"come 1 times; .*config\.generator\.repeated_tokens",
    ),
  ],
)
def test_rules_that_make_no_sense_are_refused(changes, message):
  lane = tiny.make_lane()
  with pytest.raises(ValueError, match=message):
    lane.submit([tiny.make_request(0), tiny.make_request(1, **changes)])
  assert lane.num_live() == 0
