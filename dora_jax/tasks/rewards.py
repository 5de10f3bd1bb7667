"""What a completion earns: named reward functions, and how they are found.

A reward is `reward(prompt, completion, **kwargs)` and returns a number, or a
mapping of named components of which one is "reward". It runs in a worker
process that holds no JAX (reward_pool.py), so nothing here may import it.
"""

import decimal
import functools
import logging
import math
import numbers
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dora_jax import types
from dora_jax.tasks import code_reward, lookup

Reward = Callable[..., float | Mapping[str, float]]
_LARGEST = float(np.finfo(np.float32).max)


def exact_match(prompt: types.Prompt, completion: str) -> float:
  """1 where the completion is the answer, space around either left aside."""
  return float(completion.strip() == prompt.answer.strip())


_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


def first_number(prompt: types.Prompt, completion: str) -> float:
  """1 where the first number in the completion equals the answer; else 0.

  For short arithmetic, where a base model goes on after its answer.
  """
  expected = prompt.answer.strip().replace(",", "")
  if not _NUMBER.fullmatch(expected):
    raise ValueError(
      f"The answer {prompt.answer!r} is no number: first_number cannot judge"
      " this task; set config.task.reward to another."
    )
  found = _NUMBER.search(completion.replace(",", ""))
  if found is None:
    return 0.0
  return float(decimal.Decimal(found[0]) == decimal.Decimal(expected))


def math_verify(prompt: types.Prompt, completion: str) -> Mapping[str, float]:
  """1 where the completion's final expression equals the answer in value.

  "parsed" tells a wrong expression from none; without one the reward is 0.
  Source: https://github.com/huggingface/Math-Verify.
  """
  import math_verify as library

  # Its own time limits need signals, so they fail outside of a main thread;
  # the pool keeps the time. The library warns of that at every start.
  for name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(name).setLevel(logging.ERROR)
  # On error it would answer False, and a broken verifier would train the
  # policy as if every completion were wrong.
  parse = functools.partial(
    library.parse,
    parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    raise_on_error=True,
  )
  gold = prompt.answer
  expected = parse(gold if "\\boxed" in gold else f"\\boxed{{{gold}}}")
  if not expected:
    raise ValueError(
      f"The answer {gold!r} is no mathematics: math_verify cannot judge it;"
      " set config.task.reward to another."
    )
  found = parse(completion)
  if not found:
    return {"reward": 0.0, "parsed": 0.0}
  is_right = library.verify(
    expected, found, timeout_seconds=None, raise_on_error=True
  )
  return {"reward": float(is_right), "parsed": 1.0}


def reasoning_gym(prompt: types.Prompt, completion: str) -> float:
  """The score of the reasoning-gym generator that made the prompt.

  Often partial: some pay a little for any text (countdown pays 0.01).
  Source: https://github.com/open-thought/reasoning-gym.
  """
  for key in ("generator", "parameters", "entry"):
    if key not in prompt.metadata:
      raise ValueError(
        f"Prompt {prompt.prompt_id} has no {key!r} in its metadata: the reward"
        " reasoning_gym needs config.task.source 'reasoning_gym'."
      )
  dataset = _generator(
    prompt.metadata["generator"],
    pickle.dumps(dict(prompt.metadata["parameters"])),
  )
  return dataset.score_answer(
    answer=completion.strip(), entry=prompt.metadata["entry"]
  )


@functools.lru_cache(maxsize=64)
def _generator(name: str, pickled_parameters: bytes) -> Any:
  import reasoning_gym as library

  return library.create_dataset(name, **pickle.loads(pickled_parameters))


REWARDS: Mapping[str, Reward] = {
  "code_output": code_reward.code_output,
  "exact_match": exact_match,
  "first_number": first_number,
  "math_verify": math_verify,
  "reasoning_gym": reasoning_gym,
}

# A problem for each reward, with one right and one wrong completion.
_SELF_TESTS: Mapping[str, tuple[str, Mapping[str, Any], str, str]] = {
  "code_output": ("7", {}, "```python\nprint(3 + 4)\n```", "print(8)"),
  "exact_match": ("7", {}, " 7\n", "8"),
  "first_number": ("7", {}, " 7, 8", "8, 7"),
  "math_verify": ("\\frac{1}{2}", {}, "so it is $0.5$", "so it is $0.4$"),
  "reasoning_gym": (
    "nus",
    {
      "generator": "spell_backward",
      "parameters": {"size": 1, "seed": 0},
      "entry": {"answer": "nus", "metadata": {"word": "sun"}},
    },
    "nus",
    "moon",
  ),
}


def build(name: str, kwargs: Mapping[str, Any]) -> Reward:
  """The reward of a name or import path, its arguments bound, self-tested.

  Raises:
    ValueError: there is no such reward, or it does not take these arguments.
    RuntimeError: it fails its self-test.
  """
  reward = lookup.find_function(
    name, REWARDS, what="reward", field="config.task.reward"
  )
  lookup.check_keywords(
    reward, kwargs, num_positional=2, field="config.task.reward_params"
  )
  bound = functools.partial(reward, **kwargs)
  if name in _SELF_TESTS:
    self_test(name, bound)
  return bound


def self_test(name: str, reward: Reward) -> None:
  """Scores a known right and a known wrong completion.

  A verifier that does not work in its surroundings gives 0 for everything, and
  the run learns nothing without a word; this says so at the start.

  Raises:
    RuntimeError: the right one does not earn 1, or the wrong one does.
  """
  answer, metadata, right, wrong = _SELF_TESTS[name]
  prompt = types.Prompt(
    prompt_id=0,
    tokens=np.zeros((0,), np.int32),
    text="",
    answer=answer,
    metadata=metadata,
  )
  earned, _ = check_score(reward(prompt, right))
  earned_by_wrong, _ = check_score(reward(prompt, wrong))
  if earned != 1.0 or earned_by_wrong >= 1.0:
    raise RuntimeError(
      f"Reward {name!r} fails its self-test on the answer {answer!r}:"
      f" {right!r} earns {earned}, needed 1; {wrong!r} earns"
      f" {earned_by_wrong}, needed less. Set config.task.reward to another, or"
      " mend the library that it uses."
    )


def check_score(value: Any) -> tuple[float, dict[str, float]]:
  """The reward and its components, of what a reward function returned.

  Raises:
    ValueError: it is no real number that float32 can hold, or a mapping without
      "reward" or with names that are no text.
  """
  if not isinstance(value, Mapping):
    return _check_number(value, "the reward"), {}
  for name in value:
    if not isinstance(name, str):
      raise ValueError(
        f"The reward returned a component named {lookup.shorten(name)} of type"
        f" {type(name).__name__}, but names must be text."
      )
  if "reward" not in value:
    raise ValueError(
      f"The reward returned components {lookup.shorten(sorted(value))} without"
      " 'reward'."
    )
  components = {
    str(name): _check_number(part, f"component {lookup.shorten(name)}")
    for name, part in value.items()
  }
  return components.pop("reward"), components


def _check_number(value: Any, what: str) -> float:
  # bool is an int to Python; as a reward it is a comparison gone astray.
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise ValueError(
      f"{what} is {lookup.shorten(value)} of type {type(value).__name__}, but"
      " it must be a real number."
    )
  try:
    number = float(value)
  except OverflowError:
    number = math.inf
  if not math.isfinite(number):
    raise ValueError(f"{what} is {number}, but it must be finite.")
  # Groups hold rewards in float32, where more would become infinite unseen.
  if abs(number) > _LARGEST:
    raise ValueError(
      f"{what} is {number:.3g}, but its size must be at most {_LARGEST:.3g}."
    )
  return number
