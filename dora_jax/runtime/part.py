"""What every thread of a run has: an inbox, a name, and a way to fail aloud.

A part takes orders from its inbox and posts what came of them to the runtime's.
One that fails posts its exception, after all that it has posted, and ends.
"""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

Post = Callable[[Any], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
  """A part has ended by an exception, while it was doing this."""

  part: str
  doing: str
  error: BaseException


class Part(threading.Thread):
  """A thread with an inbox; `work` runs until it is told to stop.

  Attributes:
    doing: what it is at, in words.
    since_s: since when, on the monotonic clock.
  """

  def __init__(self, *, name: str, post: Post):
    super().__init__(name=f"dora_jax {name}", daemon=True)
    self.part = name
    self.doing = "starting"
    self.since_s = time.monotonic()
    self._post = post
    self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

  def send(self, order: Any) -> None:
    """Puts an order into the inbox; None ends the part."""
    self._inbox.put(order)

  def run(self) -> None:
    """Works, and hands whatever ends it early to the runtime."""
    self.begin("starting")
    try:
      self.work()
    # The top of a thread: what is not handed on here would be lost, and the run
    # would wait for this part for ever.
    except BaseException as error:
      self._post(Failure(part=self.part, doing=self.doing, error=error))

  def work(self) -> None:
    """Takes orders until None comes."""
    raise NotImplementedError

  def begin(self, doing: str) -> None:
    """Says what it is at from now on."""
    self.doing, self.since_s = doing, time.monotonic()

  def take(self, *, block: bool) -> list[Any]:
    """The orders in the inbox; with `block`, waits for one at least."""
    orders = []
    try:
      orders.append(self._inbox.get(block=block))
      while True:
        orders.append(self._inbox.get(block=False))
    except queue.Empty:
      return orders


def alive() -> list[str]:
  """Names of the parts whose threads have not ended, of all runs."""
  return [each.part for each in threading.enumerate() if isinstance(each, Part)]
