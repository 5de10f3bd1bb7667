import fractions

import numpy as np
import pytest

from dora_jax import types
from dora_jax.tasks import rewards, sources


def make_prompt(answer, metadata=None):
  return types.Prompt(
    prompt_id=0,
    tokens=np.zeros((1,), np.int32),
    text="",
    answer=answer,
    metadata=metadata or {},
  )


@pytest.mark.parametrize(
  ("answer", "completion", "expected"),
  [
    ("7", " 7\nQ: 1+1", 1.0),
    ("7", "the sum is 7", 1.0),
    ("7", "17", 0.0),
    ("7", "7.5", 0.0),
    ("7", "7.", 1.0),
    ("7", "-7", 0.0),
    ("-7", "-7", 1.0),
    ("1,234", "1,234.0", 1.0),
    ("7", "9" * 5000, 0.0),  # int() refuses this many digits.
    ("7", "seven", 0.0),
    ("7", "", 0.0),
  ],
)
def test_first_number(answer, completion, expected):
  assert rewards.first_number(make_prompt(answer), completion) == expected


def test_first_number_refuses_an_answer_that_is_none():
  with pytest.raises(ValueError, match="'east' is no number"):
    rewards.first_number(make_prompt("east"), "1")


@pytest.mark.parametrize(
  ("answer", "completion", "expected"),
  [
    ("72", "48+24 = 72\n#### 72", 1.0),
    ("72", "The answer is \\boxed{71}.", 0.0),
    ("\\frac 9{7}", "thus $x = \\frac{18}{14}$", 1.0),
    ("\\boxed{72}", "72", 1.0),
    ("x^2+1", "\\boxed{1+x^2}", 1.0),
    ("72", "\\boxed{}", 0.0),
    ("72", "", 0.0),
  ],
)
def test_math_verify(answer, completion, expected):
  score = rewards.math_verify(make_prompt(answer), completion)
  assert score["reward"] == expected


def test_reasoning_gym_scores_as_the_generator_does():
  reward = rewards.build("reasoning_gym", {})
  params = {"min_word_len": 3, "max_word_len": 5}
  for example in sources.generate(
    "spell_backward",
    params=params,
    columns={"question": "word"},
    size=5,
    seed=2,
  ):
    prompt = make_prompt(example.answer, example.metadata)
    assert reward(prompt, f" {example.answer}\n") == 1.0
    assert rewards.check_score(reward(prompt, ""))[0] < 1.0
    assert example.answer == example.question[::-1]
  with pytest.raises(ValueError, match="no 'generator' in its metadata"):
    reward(make_prompt("7"), "7")


@pytest.mark.parametrize("name", sorted(rewards.REWARDS))
def test_self_test_tells_a_broken_verifier(name):
  rewards.self_test(name, rewards.REWARDS[name])
  for broken in (lambda *_: 0.0, lambda *_: 1.0):
    with pytest.raises(RuntimeError, match="fails its self-test"):
      rewards.self_test(name, broken)


def test_check_score_takes_every_real_number():
  for value in (2, 2.0, np.float32(2), np.int64(2), fractions.Fraction(2)):
    assert rewards.check_score(value) == (2.0, {})
  for value in (np.bool_(True), np.ones(1), 2j, np.float32("nan")):
    with pytest.raises(ValueError, match="the reward is"):
      rewards.check_score(value)
  with pytest.raises(ValueError, match="component 'length' is True"):
    rewards.check_score({"reward": 1.0, "length": True})
