"""Decides which waiting requests enter which free slots of one lane.

Pure: maps a snapshot to a plan. A request enters only when every page that it
may ever write is free, so a request that runs can always finish.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from dora_jax import types
from dora_jax.generator import pages

# Tokens belong to the key, so that KV can only ever be found by a request whose
# prompt made it; the version does, so that it is never another version's.
PromptKey = tuple[int, bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
  """One request, and what it takes to put it into its slot.

  Attributes:
    request: the request.
    slot: the free slot that it enters.
    prompt_key: under which live requests share the pages of their prompt.
    is_first: whether no live request has the prompt yet, so that it must be
      prefilled; then the shared pages are new as well.
    num_shared: full pages of the prompt that every member reads, none writes.
    num_private: pages that this request alone writes.
  """

  request: types.Request
  slot: int
  prompt_key: PromptKey
  is_first: bool
  num_shared: int
  num_private: int

  @property
  def num_new_pages(self) -> int:
    """Pages that must be free for it to enter."""
    return self.num_private + (self.num_shared if self.is_first else 0)


def prompt_key(request: types.Request, version: int) -> PromptKey:
  """The key under which requests share pages that this version prefilled."""
  return version, request.prompt.astype(np.int64).tobytes()


def num_shared_pages(prompt_length: int, page_size: int) -> int:
  """Full pages of a prompt that decoding never writes into.

  Decoding begins by feeding the last token of the prompt, at position
  prompt_length - 1, so the page of that position is private.
  """
  return (prompt_length - 1) // page_size


def num_request_pages(request: types.Request, page_size: int) -> int:
  """Pages that a request reads or writes if it runs to its limit.

  The last token that it may sample is never fed back, so has no position.
  """
  num_positions = len(request.prompt) + request.max_new_tokens - 1
  return pages.num_pages_for(num_positions, page_size)


def plan_admissions(
  waiting: Iterable[types.Request],
  *,
  version: int,
  free_slots: Sequence[int],
  num_free_pages: int,
  page_size: int,
  live_prompts: Collection[PromptKey],
) -> list[Admission]:
  """Fills free slots in order of arrival until slots or pages run out.

  The first request that does not fit stops the plan: a later, shorter one
  must not overtake it, or a long one could wait for ever.

  Args:
    waiting: requests without a slot, oldest first. What one has sampled before
      it came here does not matter: its pages are those up to its limit.
    version: that the lane serves.
    free_slots: slots without a request, in the order to fill them.
    num_free_pages: pages of the pool that nobody holds.
    page_size: token positions of a page.
    live_prompts: prompts whose pages are held by live requests of the lane.

  Returns:
    What to admit, in order. A prompt is first at most once.
  """
  plan = []
  seen = set(live_prompts)
  for slot, request in zip(free_slots, waiting, strict=False):
    key = prompt_key(request, version)
    num_shared = num_shared_pages(len(request.prompt), page_size)
    admission = Admission(
      request=request,
      slot=slot,
      prompt_key=key,
      is_first=key not in seen,
      num_shared=num_shared,
      num_private=num_request_pages(request, page_size) - num_shared,
    )
    if admission.num_new_pages > num_free_pages:
      break
    num_free_pages -= admission.num_new_pages
    seen.add(key)
    plan.append(admission)
  return plan
