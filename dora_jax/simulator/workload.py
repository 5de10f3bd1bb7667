"""What is generated: lengths, turns, pauses and rewards, all drawn by seed.

What a request is like depends on nothing but the seed, its group, its member
and, where lengths grow, the version that begins it: every schedule gets the
same work.
"""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

# Streams of draws; a request's length must not depend on what else is drawn.
_LENGTH, _PAUSE, _REWARD = range(3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
  """How a request alternates between sampling and an environment.

  Attributes:
    num_turns: of each request; 1 where no environment answers.
    pause_s: mean of the environment's time between two turns.
    pause_sigma: deviation of its logarithm.
    observation_tokens: that the environment appends after each turn but the
      last.
  """

  num_turns: int
  pause_s: float
  pause_sigma: float
  observation_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogNormal:
  """Lengths of a group's members, before growth and limit, in tokens:

  median * exp(sigma * z), z ~ N(0, 1) from the seed and the group.
  """

  median: float
  sigma: float
  seed: int

  def draw(self, group_id: int, group_size: int) -> list[float]:
    """One length a member; the same whenever it is asked."""
    rng = np.random.default_rng((self.seed, _LENGTH, group_id))
    z = rng.standard_normal(group_size)
    return (self.median * np.exp(self.sigma * z)).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Empirical:
  """Lengths that were seen: of the same group where it was, else resampled."""

  by_group: Mapping[int, Sequence[int]]
  pooled: Int[np.ndarray, "N"]
  seed: int

  def draw(self, group_id: int, group_size: int) -> list[float]:
    """One length a member; the same whenever it is asked."""
    seen = self.by_group.get(group_id, ())
    if len(seen) == group_size:
      return list(map(float, seen))
    rng = np.random.default_rng((self.seed, _LENGTH, group_id))
    return rng.choice(self.pooled, group_size).astype(float).tolist()


Lengths = LogNormal | Empirical


def read_lengths(path: pathlib.Path, *, seed: int) -> Empirical:
  """Reads a file of lengths.

  Args:
    path: of a .json file as `calibrate` writes it, {"lengths": {group: [length
      of each member]}}, or of a text file with one length a line.
    seed: for groups that the file does not name.
  """
  text = path.read_text()
  by_group: dict[int, list[int]] = {}
  if path.suffix == ".json":
    named = json.loads(text)["lengths"]
    by_group = {int(group_id): found for group_id, found in named.items()}
    pooled = [length for found in by_group.values() for length in found]
  else:
    pooled = [int(line) for line in text.split()]
  if not pooled or min(pooled) < 1:
    raise ValueError(
      f"{path} (config.workload.lengths_file) must hold lengths of at least 1 "
      "token, and at least one of them."
    )
  return Empirical(
    by_group=by_group, pooled=np.array(sorted(pooled)), seed=seed
  )


def median_for_mean(*, mean: float, sigma: float, limit: int) -> float:
  """Finds the median of a lognormal whose mean, cut at a limit, is given.

  E[min(X, c)] = m exp(s^2/2) Phi(z - s) + c (1 - Phi(z)), z = ln(c/m) / s

  Raises:
    ValueError: no median gives this mean.
  """
  if not 0 < mean < limit:
    raise ValueError(
      f"config.workload.mean_length is {mean} but must be above 0 and below "
      f"config.workload.max_length, {limit}."
    )

  def cut_mean(median: float) -> float:
    if not sigma:
      return float(min(median, limit))
    normal = statistics.NormalDist()
    z = math.log(limit / median) / sigma
    below = median * math.exp(sigma**2 / 2) * normal.cdf(z - sigma)
    return below + limit * (1 - normal.cdf(z))

  low, high = mean * 1e-6, limit * 1e3
  for _ in range(200):
    middle = math.sqrt(low * high)
    low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
  return low


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """Everything about the work that the coordinator does not decide.

  Attributes:
    lengths: before growth.
    max_length: most tokens that a request samples.
    growth: of lengths with each version: 0.01 makes them 1 % longer.
    prompt_tokens: of every prompt.
    turns: of every request.
    reward_s: mean seconds until a reward is known.
    reward_sigma: deviation of their logarithm.
    seed: of pauses and rewards.
  """

  lengths: Lengths
  max_length: int
  growth: float
  prompt_tokens: int
  turns: Turns
  reward_s: float
  reward_sigma: float
  seed: int

  def group_lengths(
    self, group_id: int, group_size: int, version: int
  ) -> list[int]:
    """Sampled tokens of each member, in all turns together.

    Args:
      group_id: the group.
      group_size: its members.
      version: that begins it.
    """
    scale = (1.0 + self.growth) ** version
    least = self.turns.num_turns
    return [
      int(min(self.max_length, max(least, round(length * scale))))
      for length in self.lengths.draw(group_id, group_size)
    ]

  def pauses_s(self, group_id: int, member: int) -> list[float]:
    """What the environment takes after each turn but the last."""
    turns = self.turns
    if turns.num_turns == 1:
      return []
    rng = np.random.default_rng((self.seed, _PAUSE, group_id, member))
    z = rng.standard_normal(turns.num_turns - 1)
    return _lognormal_of_mean(turns.pause_s, turns.pause_sigma, z).tolist()

  def reward_delay_s(self, group_id: int, member: int) -> float:
    """Until the reward of a finished request is known."""
    if not (self.reward_s and self.reward_sigma):
      return self.reward_s
    rng = np.random.default_rng((self.seed, _REWARD, group_id, member))
    z = rng.standard_normal(1)
    return float(_lognormal_of_mean(self.reward_s, self.reward_sigma, z)[0])


def _lognormal_of_mean(mean: float, sigma: float, z: np.ndarray) -> np.ndarray:
  return mean * np.exp(sigma * z - sigma**2 / 2)
