"""The thread that feeds the reward pool and reads from it."""

import dataclasses
from collections.abc import Hashable, Sequence

from dora_jax import types
from dora_jax.runtime import part
from dora_jax.runtime import quarantine as quarantine_lib
from dora_jax.tasks import reward_pool

# How long results may wait while new completions come in.
_POLL_S = 0.005


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOrder:
  """Score this completion."""

  job: Hashable
  prompt: types.Prompt
  completion: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
  """The reward pool returns results."""

  results: Sequence[reward_pool.ScoreResult]


class RewardPart(part.Part):
  """Feeds the reward pool and reads from it."""

  def __init__(
    self,
    *,
    post: part.Post,
    pool: reward_pool.RewardPool,
    quarantine: quarantine_lib.Quarantine,
  ):
    super().__init__(name="rewards", post=post)
    self._pool = pool
    self._quarantine = quarantine
    self._orders: dict[Hashable, ScoreOrder] = {}

  def work(self) -> None:
    """Submits what comes, and posts what is done."""
    while True:
      is_idle = self._pool.num_pending == 0
      if is_idle != (self.doing == "waiting for trajectories"):
        self.begin("waiting for trajectories" if is_idle else "scoring")
      for order in self.take(block=is_idle):
        if order is None:
          return
        self._orders[order.job] = order
        self._pool.submit(order.job, order.prompt, order.completion)
      results = self._pool.poll(_POLL_S)
      if results:
        self.begin("scoring")
        self._hand_on(results)

  def _hand_on(self, results: Sequence[reward_pool.ScoreResult]) -> None:
    for result in results:
      order = self._orders.pop(result.job)
      self._quarantine.note(result, order.prompt, order.completion)
    self._post(Judged(results=results))
