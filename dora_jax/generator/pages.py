"""Accounts for the pages of a KV pool: who holds which, and how often.

Knows numbers of pages only, nothing of their contents. Page 0 is the trash
page: slots without a request write there, so it is never given to a request.
"""

import dataclasses
from collections.abc import Iterable, Sequence

TRASH_PAGE = 0


def num_pages_for(num_positions: int, page_size: int) -> int:
  """Pages that hold so many token positions."""
  return -(-num_positions // page_size)


class PageAllocator:
  """Gives out pages and takes them back at their last reference.

  Invariants: each page but the trash page is either free or has at least one
  reference; a page is given out only when free.
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

  @property
  def num_free(self) -> int:
    """Pages that nobody holds."""
    return len(self._free)

  @property
  def num_used(self) -> int:
    """Pages that somebody holds, each once however many share it."""
    return self.num_pages - 1 - len(self._free)

  def alloc(self, count: int) -> list[int]:
    """Takes free pages, each with one reference."""
    if count < 0 or count > len(self._free):
      raise ValueError(
        f"{count} pages asked for, {len(self._free)} of {self.num_pages - 1} "
        "free: the scheduler must wait, or raise config.generator.num_pages."
      )
    given = [self._free.pop() for _ in range(count)]
    for page in given:
      self._references[page] = 1
    return given

  def share(self, page_ids: Iterable[int]) -> None:
    """Adds a reference to each of these pages, which must be held."""
    page_ids = list(page_ids)
    self._check_held(page_ids)
    for page in page_ids:
      self._references[page] += 1

  def release(self, page_ids: Iterable[int]) -> None:
    """Drops a reference to each of these pages; frees those without any."""
    page_ids = list(page_ids)
    self._check_held(page_ids)
    for page in page_ids:
      self._references[page] -= 1
      if self._references[page] == 0:
        self._free.append(page)

  def _check_held(self, page_ids: list[int]) -> None:
    if len(set(page_ids)) != len(page_ids):
      raise ValueError(f"One holder names a page twice: {page_ids}.")
    for page in page_ids:
      if not 0 <= page < self.num_pages or not self._references[page]:
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
