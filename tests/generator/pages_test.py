import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_jax.generator import pages

_MOVES = st.lists(
  st.tuples(st.sampled_from(["alloc", "share", "release"]), st.integers(0, 99)),
  max_size=60,
)


@given(num_pages=st.integers(2, 12), moves=_MOVES)
def test_a_page_is_free_exactly_while_nobody_holds_it(num_pages, moves):
  allocator = pages.PageAllocator(num_pages)
  holders = []  # page lists, one for each holder
  for move, number in moves:
    if move == "alloc" and number % num_pages <= allocator.num_free:
      holders.append(allocator.alloc(number % num_pages))
    elif move == "share" and holders:
      shared = list(holders[number % len(holders)])
      allocator.share(shared)
      holders.append(shared)
    elif move == "release" and holders:
      allocator.release(holders.pop(number % len(holders)))
    held = collections.Counter(page for ids in holders for page in ids)
    assert allocator.num_used == len(held)
    assert allocator.num_free == num_pages - 1 - len(held)
    assert pages.TRASH_PAGE not in held
    assert held.keys() <= set(range(num_pages))
  for ids in holders:
    allocator.release(ids)
  everything = allocator.alloc(num_pages - 1)
  assert sorted(everything) == list(range(1, num_pages))


def test_a_page_is_not_given_twice():
  allocator = pages.PageAllocator(5)
  assert not set(allocator.alloc(2)) & set(allocator.alloc(2))
  with pytest.raises(ValueError, match="1 pages asked for, 0 of 4 free"):
    allocator.alloc(1)


def test_releasing_what_nobody_holds_is_refused_and_changes_nothing():
  allocator = pages.PageAllocator(4)
  held = allocator.alloc(2)
  allocator.release(held[:1])
  for wrong in ([held[0]], held, [0], [9], [held[1], held[1]]):
    with pytest.raises(ValueError):
      allocator.release(wrong)
    with pytest.raises(ValueError):
      allocator.share(wrong)
  assert allocator.num_used == 1


def test_a_pool_without_a_page_to_give_is_refused():
  with pytest.raises(ValueError, match=r"config\.generator\.num_pages"):
    pages.PageAllocator(1)
