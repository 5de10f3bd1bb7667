import collections

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dora_jax import types
from dora_jax.generator import scheduler


def _request(group_id, member, length, max_new_tokens):
  return types.Request(
    group_id=group_id,
    member=member,
    version=4,
    prompt=np.full(length, group_id, np.int32),
    max_new_tokens=max_new_tokens,
  )


def _plan(waiting, *, free_slots, num_free_pages, live_prompts=()):
  return scheduler.plan_admissions(
    waiting,
    version=4,
    free_slots=free_slots,
    num_free_pages=num_free_pages,
    page_size=4,
    live_prompts=live_prompts,
  )


def test_pages_by_hand():
  # (prompt, new tokens) -> positions written -> (shared, private) pages of 4.
  cases = {
    (1, 1): (0, 1),  # position 0
    (4, 1): (0, 1),  # 0..3; the last prompt token is fed, so private
    (5, 1): (1, 1),  # 0..4
    (4, 2): (0, 2),  # 0..4
    (9, 4): (2, 1),  # 0..11
    (9, 5): (2, 2),  # 0..12
  }
  for (length, max_new_tokens), expected in cases.items():
    (admission,) = _plan(
      [_request(1, 0, length, max_new_tokens)], free_slots=[0], num_free_pages=9
    )
    assert (admission.num_shared, admission.num_private) == expected


def test_members_of_a_group_pay_for_the_prompt_once():
  waiting = [_request(7, member, 9, 4) for member in range(3)]
  plan = _plan(waiting, free_slots=[5, 2, 0], num_free_pages=5)
  assert [a.slot for a in plan] == [5, 2, 0]
  assert [a.is_first for a in plan] == [True, False, False]
  assert [a.num_new_pages for a in plan] == [3, 1, 1]
  later = _plan(
    [_request(7, 3, 9, 4)],
    free_slots=[1],
    num_free_pages=1,
    live_prompts={plan[0].prompt_key},
  )
  assert [a.is_first for a in later] == [False]


def test_a_short_request_does_not_overtake_a_long_one():
  waiting = [_request(1, 0, 20, 4), _request(2, 0, 1, 1)]
  assert not _plan(waiting, free_slots=[0, 1], num_free_pages=5)
  assert len(_plan(waiting, free_slots=[0, 1], num_free_pages=7)) == 2


def test_a_prompt_is_known_by_version_and_tokens():
  request = _request(1, 0, 4, 2)
  wide = types.Request(
    group_id=1,
    member=1,
    version=4,
    prompt=request.prompt.astype(np.int64),
    max_new_tokens=2,
  )
  key = scheduler.prompt_key(request, 4)
  assert key == scheduler.prompt_key(wide, 4)
  assert key != scheduler.prompt_key(request, 5)
  assert key != scheduler.prompt_key(_request(2, 0, 4, 2), 4)


@given(
  sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=12),
  free_slots=st.sets(st.integers(0, 9)),
  num_free_pages=st.integers(0, 30),
)
def test_a_plan_is_a_prefix_that_fits(sizes, free_slots, num_free_pages):
  members = collections.Counter()
  waiting = []
  for group_id, max_new_tokens in sizes:
    # The length of a prompt follows from its group.
    request = _request(
      group_id, members[group_id], 1 + 4 * group_id, max_new_tokens
    )
    members[group_id] += 1
    waiting.append(request)
  plan = _plan(
    waiting, free_slots=sorted(free_slots), num_free_pages=num_free_pages
  )
  assert [a.request for a in plan] == waiting[: len(plan)]
  assert {a.slot for a in plan} <= free_slots
  assert len({a.slot for a in plan}) == len(plan)
  assert sum(a.num_new_pages for a in plan) <= num_free_pages
  firsts = [a.prompt_key for a in plan if a.is_first]
  assert sorted(firsts) == sorted({a.prompt_key for a in plan})
