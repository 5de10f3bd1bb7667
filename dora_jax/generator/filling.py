"""A request on its way into a slot, and what is still to prefill for it."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from dora_jax.generator import kv_transfer, pages, prefill
from dora_jax.generator import live as live_lib


@dataclasses.dataclass(kw_only=True, eq=False)
class Filling:
  """A request that has its slot and its pages, but not all of its KV.

  Attributes:
    slot: the slot.
    parcel: the request as it came, to go back to the line as.
    live: the request as it will be in the slot.
    keys: by which its first pages are found once they are filled.
    copied_from: page of another member of the group that holds the beginning of
      the page with its position; None where there is nothing to copy.
    blocks: what is left to prefill, in order.
  """

  slot: int
  parcel: kv_transfer.Parcel
  live: live_lib.Live
  keys: Sequence[pages.PageKey] = ()
  copied_from: int | None = None
  blocks: collections.deque[prefill.Block] = dataclasses.field(
    default_factory=collections.deque
  )

  @property
  def num_kv_tokens(self) -> int:
    """Positions that have KV, all before the rest."""
    return self.blocks[0].start if self.blocks else self.live.position

  def take_blocks(self, count: int, page_size: int) -> list[prefill.Block]:
    """The next blocks to prefill, which the next call must do.

    Their pages are found from then on: whoever finds one is computed later.
    """
    taken = [self.blocks.popleft() for _ in range(min(count, len(self.blocks)))]
    for block in taken:
      first = block.start // page_size
      num_found = block.filled.count(pages.TRASH_PAGE)
      self.label(first + num_found, first + len(block.filled))
    return taken

  def label(self, first: int, end: int) -> None:
    """Has those of these pages found that others may share."""
    claim = self.live.claim
    for index in range(first, min(end, len(self.keys))):
      claim.allocator.label(claim.page_ids[index], self.keys[index])


def cut(
  tokens: Int[np.ndarray, "T"],
  page_ids: Sequence[int],
  *,
  num_found: int,
  page_size: int,
  block_pages: int,
) -> collections.deque[prefill.Block]:
  """The blocks that compute the KV of some tokens, all but those found.

  A block of which some pages are found is computed again, so that the rest
  comes out as if none were, but the found ones are not written.

  Args:
    tokens: from position 0 on.
    page_ids: pages of the request, in order of position.
    num_found: of these, pages that hold their KV already.
    page_size: token positions of a page.
    block_pages: pages of a block.
  """
  num_filled = pages.num_pages_for(len(tokens), page_size)
  if num_filled == num_found:
    return collections.deque()
  targets = [pages.TRASH_PAGE] * num_found + list(
    page_ids[num_found:num_filled]
  )
  first_page = num_found - num_found % block_pages
  return collections.deque(
    prefill.Block(
      tokens=tokens[page * page_size : (page + block_pages) * page_size],
      start=page * page_size,
      page_ids=page_ids[: page + block_pages],
      filled=targets[page : page + block_pages],
    )
    for page in range(first_page, num_filled, block_pages)
  )
