"""Any requests, in any order, give what a reference engine makes of them.

The reference takes one request at a time, has no cache and runs a full forward
pass for each token, with the same draws: `tiny.generate_slowly`.
"""

import functools

import hypothesis
import numpy as np
from hypothesis import strategies as st

from tests.generator import tiny

# Lanes: (settings). The second has pages for little more than one request, the
# third blocks of one chunk, so that all long prompts take several.
_SETTINGS = (
  {},
  {"lanes": [(0, 3)], "num_pages": 30},
  {"lanes": [(0, 2)], "prefill_chunk": 8, "chunk_steps": 2},
)
# What prompts begin with; blocks are 64 tokens, or 8.
_BASE = tiny.make_prompt(0, 96)


@functools.cache
def _lane(index):
  """Kept for all examples: none may leave anything but cached pages behind."""
  return tiny.make_lane(**_SETTINGS[index])


@functools.cache
def _slow(group_id, shared, own, max_new_tokens, temperature):
  request = _request(group_id, shared, own, max_new_tokens, temperature)
  return tiny.generate_slowly(request)


def _request(group_id, shared, own, max_new_tokens, temperature):
  prompt = np.concatenate([_BASE[:shared], tiny.make_prompt(group_id, own)])
  return tiny.make_request(
    group_id,
    prompt=prompt,
    max_new_tokens=max_new_tokens,
    temperature=temperature,
  )


@st.composite
def _arrivals(draw):
  """Requests with prompts of 1 to 96 tokens; and steps between them."""
  rows = []
  for group_id in range(draw(st.integers(1, 7))):
    shared = draw(st.sampled_from([0, 0, 3, 4, 9, 63, 64, 65, 90]))
    own = draw(st.integers(1, min(20, 96 - shared)))
    left = tiny.MAX_LENGTH - shared - own
    limits = [1, 2, 3, 5, 8, left]
    max_new_tokens = draw(st.sampled_from([n for n in limits if n <= left]))
    temperature = draw(st.sampled_from([0.0, 1.0]))
    rows.append((group_id, shared, own, min(max_new_tokens, 24), temperature))
  steps = draw(st.lists(st.integers(0, 3), min_size=len(rows)))
  return rows, steps


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(arrivals=_arrivals(), index=st.integers(0, 2))
# All slots end at once, with pages of 4 exactly full: 5 + 4 - 1 positions.
@hypothesis.example(
  arrivals=([(group_id, 0, 5, 4, 1.0) for group_id in range(4)], [0] * 4),
  index=0,
)
# One token and no more, of one token and of as many as there is room for.
@hypothesis.example(
  arrivals=([(0, 0, 1, 1, 1.0), (1, 90, 6, 4, 1.0)], [0, 0]), index=1
)
def test_equals_the_reference(arrivals, index):
  lane = _lane(index)
  rows, steps = arrivals
  finished = []
  for row, num_steps in zip(rows, steps, strict=False):
    lane.submit([_request(*row)])
    for _ in range(num_steps):
      finished += lane.step()
  finished += tiny.run(lane)
  tiny.assert_close(finished, [_slow(*row) for row in rows])
  assert lane._pool.allocator.num_used == 0


def test_who_stops_at_the_first_token():
  rows = [(group_id, 0, 5, 8, 1.0) for group_id in range(60)]
  slow = {row: _slow(*row) for row in rows}
  rows = [row for row in rows if len(slow[row].completion) == 1]
  assert len(rows) > 1 and slow[rows[0]].finish_reason == "stop"
  finished = tiny.run(_lane(0), [_request(*row) for row in rows])
  tiny.assert_close(finished, [slow[row] for row in rows])
