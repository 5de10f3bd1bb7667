import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_jax.generator import pages

_MOVES = st.lists(
  st.tuples(
    st.sampled_from(["alloc", "share", "release", "label", "find", "drop"]),
    st.integers(0, 99),
  ),
  max_size=60,
)


def _key(number: int) -> pages.PageKey:
  """One of few, of version 0 or 1."""
  return number % 2, bytes([number % 6])


@given(num_pages=st.integers(2, 12), moves=_MOVES)
def test_a_page_is_free_exactly_while_nobody_holds_it(num_pages, moves):
  allocator = pages.PageAllocator(num_pages)
  holders = []  # page lists, one for each holder
  labelled = {}  # page -> its key, as long as it may be found
  for move, number in moves:
    held = {page for ids in holders for page in ids}
    if move == "alloc" and number % num_pages <= allocator.num_free:
      holders.append(allocator.alloc(number % num_pages))
      for page in holders[-1]:
        labelled.pop(page, None)
    elif move == "share" and holders:
      shared = list(holders[number % len(holders)])
      allocator.share(shared)
      holders.append(shared)
    elif move == "release" and holders:
      allocator.release(holders.pop(number % len(holders)))
    elif move == "label" and held - labelled.keys():
      page = min(held - labelled.keys())
      allocator.label(page, _key(number))
      if _key(number) not in labelled.values():
        labelled[page] = _key(number)
    elif move == "find":
      found = allocator.find([_key(number)])
      allocator.share(found)
      holders.append(found)
    elif move == "drop":
      allocator.drop(number % 2)
      labelled = {p: k for p, k in labelled.items() if k[0] != number % 2}
    held = collections.Counter(page for ids in holders for page in ids)
    assert allocator.num_used == len(held)
    assert allocator.num_free == num_pages - 1 - len(held)
    assert pages.TRASH_PAGE not in held
    assert held.keys() <= set(range(num_pages))
    for page, key in labelled.items():
      assert allocator.find([key]) == [page]
      assert allocator.num_idle([page]) == (page not in held)
    assert sum(
      map(len, map(allocator.find, {(_key(n),) for n in range(6)}))
    ) == (len(labelled))
  for ids in holders:
    allocator.release(ids)
  everything = allocator.alloc(num_pages - 1)
  assert sorted(everything) == list(range(1, num_pages))
  assert not any(allocator.find([_key(number)]) for number in range(6))


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


def test_what_is_kept_longest_unused_goes_first_and_ends_before_beginnings():
  allocator = pages.PageAllocator(8)
  keys = {
    name: pages.page_keys((ord(name),) * 6, version=0, page_size=2)
    for name in "ab"
  }
  for name in "ab":
    page_ids = allocator.alloc(3)
    for page, key in zip(page_ids, keys[name], strict=True):
      allocator.label(page, key)
    allocator.release(page_ids)
  found = {name: allocator.find(keys[name]) for name in "ab"}
  assert allocator.num_free == 7 and allocator.num_idle(found["a"]) == 3
  # Used again, so b has been left alone longest now.
  allocator.share(found["a"])
  allocator.release(found["a"])
  kept = []
  for _ in range(7):
    kept.append([len(allocator.find(keys[name])) for name in "ab"])
    allocator.alloc(1)
  # The free page goes first, then b from its end on, then a.
  assert kept == [[3, 3], [3, 3], [3, 2], [3, 1], [3, 0], [2, 0], [1, 0]]


def test_a_page_is_found_by_all_tokens_up_to_its_end_and_by_the_version():
  find = lambda tokens, version=0: pages.page_keys(
    tuple(tokens), version=version, page_size=2
  )
  keys = find([1, 2, 3, 4, 5])
  assert len(keys) == 2 and keys == find([1, 2, 3, 4])
  assert keys[:1] == find([1, 2, 9]) and keys[1] != find([9, 2, 3, 4])[1]
  assert not set(keys) & set(find([3, 4, 1, 2]))
  assert not set(keys) & set(find([12, 3, 4, 5]))
  assert not set(keys) & set(find([1, 2, 3, 4], version=1))
