import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dora_jax import types
from dora_jax.generator import pages, scheduler


def _request(length, max_new_tokens, group_id=1):
  return types.Request(
    group_id=group_id,
    member=0,
    version=4,
    prompt=np.full(length, group_id, np.int32),
    max_new_tokens=max_new_tokens,
  )


def _plan(request, allocator):
  return scheduler.plan_admission(
    request,
    request.prompt[:-1],
    version=4,
    allocator=allocator,
    page_size=4,
  )


def _enter(request, allocator):
  """Takes what the plan says, as a lane does; returns the pages."""
  plan = _plan(request, allocator)
  allocator.share(plan.found)
  page_ids = [*plan.found, *allocator.alloc(plan.num_new)]
  for page, key in zip(page_ids, plan.keys, strict=False):
    allocator.label(page, key)
  return page_ids


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
  for (length, max_new_tokens), (shared, private) in cases.items():
    plan = _plan(_request(length, max_new_tokens), pages.PageAllocator(9))
    assert (len(plan.keys), plan.num_new) == (shared, shared + private)
    assert not plan.found and not plan.num_lacking


def test_a_prompt_is_paid_for_once_while_its_pages_are_there():
  allocator = pages.PageAllocator(6)
  member = _request(9, 4)
  first = _enter(member, allocator)
  second = _plan(member, allocator)
  assert second.found == first[:2] and second.num_new == 1
  assert _plan(_request(9, 4, group_id=2), allocator).num_new == 3
  # 2 of the 5 pages are free; what it finds is held, so it takes 1 of them.
  assert _plan(_request(9, 8), allocator).num_lacking == 0
  assert _plan(_request(9, 12), allocator).num_lacking == 1
  allocator.release(first)
  # All 5 are free now, but the 2 that it finds are not free for it twice.
  assert _plan(_request(9, 12), allocator).num_lacking == 0
  assert _plan(_request(9, 16), allocator).num_lacking == 1


def test_a_prompt_is_known_by_version_and_tokens():
  request = _request(4, 2)
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
  assert key != scheduler.prompt_key(_request(4, 2, group_id=2), 4)


@given(
  sizes=st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 12), st.booleans()),
    max_size=24,
  ),
  num_pages=st.integers(2, 30),
)
def test_who_lacks_nothing_can_enter_and_who_does_cannot(sizes, num_pages):
  allocator = pages.PageAllocator(num_pages)
  held = []
  for group_id, max_new_tokens, leaves in sizes:
    if leaves and held:
      allocator.release(held.pop(0))
    request = _request(1 + 4 * group_id, max_new_tokens, group_id)
    plan = _plan(request, allocator)
    num_free = allocator.num_free
    taken = plan.num_new + allocator.num_idle(plan.found)
    assert plan.num_lacking == max(0, taken - num_free)
    if plan.num_lacking:
      continue
    held.append(_enter(request, allocator))
    assert allocator.num_free == num_free - taken
    assert len(held[-1]) == scheduler.num_request_pages(request, 4)
