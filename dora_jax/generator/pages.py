"""Accounts for the pages of a KV pool: who holds which, and what they hold.

Knows numbers of pages only, and by which keys their contents are found. Page 0
is the trash page: slots without a request write there, so it is never given to
a request.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence

TRASH_PAGE = 0

# The version whose KV a page holds, and a digest of all tokens up to its end.
PageKey = tuple[int, bytes]

# Sequences whose keys are remembered: those that wait are looked up each step.
_NUM_REMEMBERED = 64


def num_pages_for(num_positions: int, page_size: int) -> int:
  """Pages that hold so many token positions."""
  return -(-num_positions // page_size)


@functools.lru_cache(maxsize=_NUM_REMEMBERED)
def page_keys(
  tokens: tuple[int, ...], *, version: int, page_size: int
) -> tuple[PageKey, ...]:
  """Keys of the full pages of a sequence, in order of position.

  Each digest is of the one before and of the page's own tokens. So a page is
  found only by who has all tokens up to its end, at the version that made it.
  """
  keys, digest = [], b""
  for end in range(page_size, len(tokens) + 1, page_size):
    page = ",".join(map(str, tokens[end - page_size : end])).encode()
    digest = hashlib.blake2b(digest + page, digest_size=16).digest()
    keys.append((version, digest))
  return tuple(keys)


class PageAllocator:
  """Gives out pages, takes them back, and finds what they hold.

  A page whose last reference is dropped keeps what it holds, and is found by
  its key, until another needs it; those left alone longest go first.

  Invariants: each page but the trash page is free, or idle, or has at least one
  reference; an idle page has a key, no key has two pages.
  """

  def __init__(self, num_pages: int):
    if num_pages < 2:
      raise ValueError(
        f"A KV pool needs the trash page and at least 1 more, but has "
        f"{num_pages}: raise config.generator.num_pages."
      )
    self.num_pages = num_pages
    self._references = [0] * num_pages
    # Last in, first out: pages used lately are likelier to be in a cache.
    self._free = list(range(num_pages - 1, TRASH_PAGE, -1))
    # Without a reference but with a key; the first is the next to go.
    self._idle: dict[int, None] = {}
    self._by_key: dict[PageKey, int] = {}
    self._keys: dict[int, PageKey] = {}

  @property
  def num_free(self) -> int:
    """Pages that nobody holds."""
    return len(self._free) + len(self._idle)

  @property
  def num_used(self) -> int:
    """Pages that somebody holds, each once however many share it."""
    return self.num_pages - 1 - self.num_free

  def alloc(self, count: int) -> list[int]:
    """Takes pages that nobody holds, each with one reference.

    Those without a key come first, then those that were found longest ago.
    """
    if count < 0 or count > self.num_free:
      raise ValueError(
        f"{count} pages asked for, {self.num_free} of {self.num_pages - 1} "
        "free: the scheduler must wait, or raise config.generator.num_pages."
      )
    while len(self._free) < count:
      page = next(iter(self._idle))
      del self._idle[page]
      self._free.append(self._lose_key(page))
    given = [self._free.pop() for _ in range(count)]
    for page in given:
      self._references[page] = 1
    return given

  def share(self, page_ids: Iterable[int]) -> None:
    """Adds a reference to each of these pages, which are held or idle."""
    page_ids = list(page_ids)
    self._check_kept(page_ids, or_idle=True)
    for page in page_ids:
      self._idle.pop(page, None)
      self._references[page] += 1

  def release(self, page_ids: Iterable[int]) -> None:
    """Drops a reference to each of these pages, in order of position."""
    page_ids = list(page_ids)
    self._check_kept(page_ids, or_idle=False)
    # The last goes first: without the pages before it, it would not be found.
    for page in reversed(page_ids):
      self._references[page] -= 1
      if not self._references[page] and page in self._keys:
        self._idle[page] = None
      elif not self._references[page]:
        self._free.append(page)

  def label(self, page: int, key: PageKey) -> None:
    """Has a held page, which nobody writes any more, found by this key.

    Nothing happens if another page is: it holds the same.
    """
    self._check_kept([page], or_idle=False)
    if key not in self._by_key:
      self._by_key[key] = page
      self._keys[page] = key

  def find(self, keys: Iterable[PageKey]) -> list[int]:
    """The pages of the longest run of keys, from the first, that there is."""
    found = []
    for key in keys:
      if key not in self._by_key:
        break
      found.append(self._by_key[key])
    return found

  def num_idle(self, page_ids: Iterable[int]) -> int:
    """How many of these pages nobody holds."""
    return sum(page in self._idle for page in page_ids)

  def drop(self, version: int) -> None:
    """Has nothing of this version found any more; its idle pages are free."""
    for page, (made_by, _) in list(self._keys.items()):
      if made_by == version:
        self._lose_key(page)
        if page in self._idle:
          del self._idle[page]
          self._free.append(page)

  def _lose_key(self, page: int) -> int:
    del self._by_key[self._keys.pop(page)]
    return page

  def _check_kept(self, page_ids: list[int], *, or_idle: bool) -> None:
    if len(set(page_ids)) != len(page_ids):
      raise ValueError(f"One holder names a page twice: {page_ids}.")
    for page in page_ids:
      is_page = 0 <= page < self.num_pages
      is_idle = or_idle and page in self._idle
      if not is_page or not (self._references[page] or is_idle):
        raise ValueError(
          f"Page {page} is not held by anyone (pages 1 to "
          f"{self.num_pages - 1} can be): freed twice or never allocated."
        )


@dataclasses.dataclass(kw_only=True, eq=False)
class PageClaim:
  """The pages of one request, each with a reference of its own.

  Attributes:
    allocator: of the pool that the pages are of.
    page_ids: the pages, in order of position.
    is_held: whether the references are still there; what only names a claim,
      as a parcel does, must not read its pages once they are not.
  """

  allocator: PageAllocator
  page_ids: Sequence[int]
  is_held: bool = True

  def share(self) -> "PageClaim":
    """Another claim on the same pages, which outlives this one."""
    if not self.is_held:
      raise ValueError(
        f"Pages {list(self.page_ids)} were released before they were taken "
        "over: their request was finished, refreshed or cancelled meanwhile."
      )
    self.allocator.share(self.page_ids)
    return PageClaim(allocator=self.allocator, page_ids=self.page_ids)

  def release(self) -> None:
    """Drops the references, once."""
    assert self.is_held, "a claim is released by its one owner"
    self.allocator.release(self.page_ids)
    self.is_held = False
