"""Completions without a reward: each on a line of a file, and how many of all.

A fault of the reward is not a reward of 0: what it concerns is not trained on,
so somebody has to be able to look at it.
"""

import collections
import json
import pathlib

from absl import logging

from dora_jax import types
from dora_jax.tasks import reward_pool

FILE_NAME = "quarantine.jsonl"
# Of the last so many completions, this share without a reward rings the alarm,
# which rings again once it has been below half of that.
_WINDOW = 100
_ALARM_SHARE = 0.1
# Fewer say nothing about a share.
_LEAST = 20
# A reward that fails for ever must not fill the disk.
_MOST_LINES = 10_000


class RewardsFail(RuntimeError):
  """Not one of the last completions has a reward: the reward is broken."""


class Quarantine:
  """Keeps count of scores; used by the thread of the rewards.

  Attributes:
    num_retried: tries beyond the first of each completion.
    num_lines: completions that have no reward.
  """

  def __init__(self, workdir: pathlib.Path):
    """Makes no file before there is something to write."""
    self.num_retried = 0
    self.num_lines = 0
    self._path = workdir / FILE_NAME
    self._window = collections.deque[bool](maxlen=_WINDOW)
    self._is_ringing = False

  @property
  def error_share(self) -> float:
    """Share without a reward, of the last 100 completions."""
    return sum(self._window) / max(len(self._window), 1)

  def note(
    self, result: reward_pool.ScoreResult, prompt: types.Prompt, completion: str
  ) -> None:
    """Counts a result; writes it down where there is no reward.

    Raises:
      RewardsFail: there was none for the last 100 completions either.
    """
    self.num_retried += result.num_tries - 1
    self._window.append(result.error is not None)
    if result.error is not None:
      self._write(result, prompt, completion)
      self._check(result.error)
    elif self.error_share < _ALARM_SHARE / 2:
      self._is_ringing = False

  def metrics(self) -> dict[str, float]:
    """What a step reports."""
    return {
      "reward/retried": float(self.num_retried),
      "reward/quarantined": float(self.num_lines),
      "reward/error_share": self.error_share,
    }

  def _write(
    self, result: reward_pool.ScoreResult, prompt: types.Prompt, completion: str
  ) -> None:
    self.num_lines += 1
    if self.num_lines > _MOST_LINES:
      return
    assert isinstance(result.job, tuple)
    purpose, group_id, member = result.job
    line = {
      "purpose": purpose,
      "group_id": group_id,
      "member": member,
      "prompt_id": prompt.prompt_id,
      "prompt": prompt.text,
      "answer": prompt.answer,
      "completion": completion,
      "error": result.error,
      "num_tries": result.num_tries,
    }
    with self._path.open("a", encoding="utf-8") as file:
      file.write(json.dumps(line) + "\n")

  def _check(self, error: str) -> None:
    """Rings where too many have no reward."""
    num_failed, num_all = sum(self._window), len(self._window)
    if num_failed == _WINDOW:
      raise RewardsFail(
        f"None of the last {_WINDOW} completions could be scored, the last: "
        f"{error!r}. Mend config.task.reward; all are in {FILE_NAME} of the "
        "workdir."
      )
    is_much = num_all >= _LEAST and self.error_share >= _ALARM_SHARE
    if is_much and not self._is_ringing:
      self._is_ringing = True
      logging.error(
        "%d of the last %d completions have no reward (config.task.reward), "
        "and their groups are replaced. The last: %r. All are in %s of the "
        "workdir.",
        num_failed,
        num_all,
        error,
        FILE_NAME,
      )
