"""Held-out accuracy of one version, measured while training goes on.

An evaluation holds its version in the store from beginning to end, so it
speaks of exactly one. It runs on a lane of its own: the trainer never waits for
it, and generators share only their mesh with it.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from absl import logging

from dora_jax import types
from dora_jax.tasks import reward_pool
from dora_jax.weights import store as store_lib

# Draws of an evaluation never coincide with those of training.
STREAM = 1
HOLDER = "evaluation"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What one version earned on held-out prompts.

  Attributes:
    version: the policy version.
    accuracy: share of completions that earned at least the reward of a
      solved prompt.
    reward_mean: over completions that could be scored.
    length_mean: of their completions, in tokens.
    num_scored: completions that could be scored.
    num_failed: completions whose reward could not be had.
  """

  version: int
  accuracy: float
  reward_mean: float
  length_mean: float
  num_scored: int
  num_failed: int


class Evaluation:
  """Evaluates versions one after the other; used by the runtime's thread.

  Attributes:
    results: of finished evaluations, in order.
    num_skipped: versions due while another was still under way.
    is_lost: whether its lane is gone, so that nothing is evaluated any more.
  """

  def __init__(
    self,
    *,
    prompts: Sequence[types.Prompt],
    samples_per_prompt: int,
    sampling: types.Sampling,
    stopping: types.Stopping,
    max_new_tokens: int,
    solved_reward: float,
    store: store_lib.WeightStore,
    mesh_id: int,
    load: Callable[[int], None],
    submit: Callable[[Sequence[types.Request]], None],
    unload: Callable[[], None],
  ):
    """Prepares; `load`, `submit` and `unload` reach the evaluation's lane.

    Args:
      prompts: held-out ones; with none, nothing is ever evaluated.
      samples_per_prompt: completions of each.
      sampling: of their tokens.
      stopping: what ends them.
      max_new_tokens: of a completion.
      solved_reward: the least reward of a solved prompt.
      store: where a version is held.
      mesh_id: of the lane.
      load: makes the lane serve a version, which `serve` then hears.
      submit: gives requests to the lane.
      unload: makes the lane let go of the version.
    """
    self.results: list[Result] = []
    self.num_skipped = 0
    self.is_lost = False
    self._prompts = prompts
    self._samples = samples_per_prompt
    self._sampling = sampling
    self._stopping = stopping
    self._max_new_tokens = max_new_tokens
    self._solved_reward = solved_reward
    self._store = store
    self._mesh_id = mesh_id
    self._load, self._submit, self._unload = load, submit, unload
    self._version: int | None = None
    self._due: collections.deque[int] = collections.deque()
    self._rewards: list[float] = []
    self._lengths: list[int] = []
    self._num_failed = 0

  @property
  def version(self) -> int | None:
    """The version that is being evaluated; None while there is none."""
    return self._version

  def is_idle(self) -> bool:
    """Whether nothing is under way or due."""
    return self._version is None and not self._due

  def pending(self) -> list[int]:
    """Versions whose evaluation is under way or due."""
    now = [] if self._version is None else [self._version]
    return [*now, *self._due]

  def request(self, version: int, *, must_run: bool) -> None:
    """Evaluates the newest version, now or after the one under way.

    Args:
      version: which lives in the store.
      must_run: whether it may not be skipped where another is under way.
    """
    known = {self._version, *self._due, *(r.version for r in self.results)}
    if self.is_lost or not self._prompts or version in known:
      return
    if self._version is not None and not must_run:
      self.num_skipped += 1
      logging.warning(
        "Version %d is not evaluated: version %d still is.",
        version,
        self._version,
      )
      return
    self._store.reserve(version, holder=HOLDER, mesh_id=self._mesh_id)
    self._due.append(version)
    self._begin_next()

  def lose(self) -> None:
    """Ends what is under way and due: its lane is gone, with its versions."""
    self.is_lost = True
    self._version = None
    self._due.clear()

  def serve(self) -> None:
    """Hears that the lane serves the version; submits every request."""
    assert self._version is not None
    self._submit(
      [
        types.Request(
          group_id=index,
          member=sample,
          version=self._version,
          prompt=prompt.tokens,
          max_new_tokens=self._max_new_tokens,
          sampling=self._sampling,
          stopping=self._stopping,
          stream=STREAM,
        )
        for index, prompt in enumerate(self._prompts)
        for sample in range(self._samples)
      ]
    )

  def prompt(self, trajectory: types.Trajectory) -> types.Prompt:
    """The prompt that a trajectory of the evaluation continues."""
    if trajectory.version != self._version:
      raise ValueError(
        f"A trajectory of version {trajectory.version} came back to the "
        f"evaluation of version {self._version}."
      )
    self._lengths.append(len(trajectory.completion))
    return self._prompts[trajectory.group_id]

  def score(self, result: reward_pool.ScoreResult) -> Result | None:
    """Takes a score; returns the result with the last one."""
    if self.is_lost:
      return None
    assert self._version is not None
    if result.reward is None:
      self._num_failed += 1
      logging.error("A held-out completion has no reward: %s", result.error)
    else:
      self._rewards.append(result.reward)
    expected = len(self._prompts) * self._samples
    if len(self._rewards) + self._num_failed < expected:
      return None
    if not self._rewards:
      raise RuntimeError(
        f"None of {expected} held-out completions of version {self._version} "
        "could be scored: see the errors that config.task.reward reports."
      )
    rewards = np.array(self._rewards)
    done = Result(
      version=self._version,
      accuracy=float(np.mean(rewards >= self._solved_reward)),
      reward_mean=float(np.mean(rewards)),
      length_mean=float(np.mean(self._lengths)),
      num_scored=len(rewards),
      num_failed=self._num_failed,
    )
    self.results.append(done)
    self._unload()
    self._version = None
    self._begin_next()
    return done

  def _begin_next(self) -> None:
    if self._version is not None or not self._due:
      return
    self._version = self._due.popleft()
    self._rewards, self._lengths, self._num_failed = [], [], 0
    self._load(self._version)
