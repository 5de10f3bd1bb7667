"""Decides whether the first request that waits for pages enters a lane.

Pure: maps a snapshot to a plan. A request enters only when every page that it
may ever write is free, so a request that runs can always finish.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from dora_jax import types
from dora_jax.generator import pages

# Tokens belong to the key, so that KV is only ever copied by a request whose
# prompt made it; the version does, so that it is never another version's.
PromptKey = tuple[int, bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
  """What it takes for a request to enter.

  Attributes:
    keys: of the full pages of its tokens, which it shares and never writes
      once they are filled.
    found: pages that hold the first of them already.
    num_new: pages to allocate.
    num_lacking: pages that must become free before it can enter.
  """

  keys: Sequence[pages.PageKey]
  found: Sequence[int]
  num_new: int
  num_lacking: int


def prompt_key(request: types.Request, version: int) -> PromptKey:
  """By which live requests of one prompt and version know each other."""
  return version, request.prompt.astype(np.int64).tobytes()


def num_request_pages(request: types.Request, page_size: int) -> int:
  """Pages that a request reads or writes if it runs to its limit.

  The last token that it may sample is never fed back, so has no position.
  """
  num_positions = len(request.prompt) + request.max_new_tokens - 1
  return pages.num_pages_for(num_positions, page_size)


def plan_admission(
  request: types.Request,
  tokens: Int[np.ndarray, "T"],
  *,
  version: int,
  allocator: pages.PageAllocator,
  page_size: int,
) -> Admission:
  """What a request needs to enter now, besides a slot.

  Args:
    request: the request.
    tokens: those before the one to feed next whose KV is prefill's, hence the
      same for all that have the same tokens.
    version: that the lane serves.
    allocator: of the pool; only looked at.
    page_size: token positions of a page.
  """
  keys = pages.page_keys(
    tuple(tokens.tolist()), version=version, page_size=page_size
  )
  found = allocator.find(keys)
  num_new = num_request_pages(request, page_size) - len(found)
  # An idle page that it finds is not free for others any more.
  num_taken = num_new + allocator.num_idle(found)
  return Admission(
    keys=keys,
    found=found,
    num_new=num_new,
    num_lacking=max(0, num_taken - allocator.num_free),
  )
