"""The requests of a lane that wait for a slot, in the order to serve them."""

import collections
from collections.abc import Callable, Iterator, Sequence

from dora_jax.generator import kv_transfer


class WaitingLine:
  """Three queues: who holds pages already, who has been here, who is new.

  Who holds pages goes first and overtakes the others: it needs a slot only, and
  those who wait for pages may be waiting for its own.
  """

  def __init__(self):
    self._holding: collections.deque[kv_transfer.Parcel] = collections.deque()
    self._returned: collections.deque[kv_transfer.Parcel] = collections.deque()
    self._new: collections.deque[kv_transfer.Parcel] = collections.deque()

  def __len__(self) -> int:
    return len(self._holding) + len(self._returned) + len(self._new)

  def __iter__(self) -> Iterator[kv_transfer.Parcel]:
    """All of them, those with pages first."""
    yield from self._holding
    yield from self.without_pages()

  @property
  def num_holding(self) -> int:
    """Those that need a slot only."""
    return len(self._holding)

  def without_pages(self) -> Iterator[kv_transfer.Parcel]:
    """Those that need pages as well, in order."""
    yield from self._returned
    yield from self._new

  def add_new(self, parcels: Sequence[kv_transfer.Parcel]) -> None:
    """Queues requests behind all others."""
    self._new.extend(parcels)

  def add_returned(self, parcels: Sequence[kv_transfer.Parcel]) -> None:
    """Queues requests that began elsewhere, before all new ones."""
    for parcel in parcels:
      holds = parcel.claim is not None
      (self._holding if holds else self._returned).append(parcel)

  def put_back(self, parcels: Sequence[kv_transfer.Parcel]) -> None:
    """Queues requests before all others that need what they need."""
    for parcel in reversed(parcels):
      holds = parcel.claim is not None
      (self._holding if holds else self._returned).appendleft(parcel)

  def pop_holding(self) -> kv_transfer.Parcel:
    """Takes the first of those that need a slot only."""
    return self._holding.popleft()

  def pop(self) -> kv_transfer.Parcel:
    """Takes the first of `without_pages`."""
    return (self._returned or self._new).popleft()

  def take(
    self, is_meant: Callable[[kv_transfer.Parcel], bool]
  ) -> list[kv_transfer.Parcel]:
    """Takes those that are meant, wherever they stand."""
    taken = []
    for queue in (self._holding, self._returned, self._new):
      taken += [parcel for parcel in queue if is_meant(parcel)]
      left = [parcel for parcel in queue if not is_meant(parcel)]
      queue.clear()
      queue.extend(left)
    return taken
