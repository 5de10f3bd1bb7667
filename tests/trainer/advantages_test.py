"""Advantages against numbers worked out by hand."""

import numpy as np
import pytest

from dora_jax.trainer import advantages


def test_advantages_are_centered_and_scaled():
  # Mean 1, deviations -1, -1, 1, 1: std 1, the eps of 1 halves them.
  rewards_PM = np.array([[0.0, 0.0, 2.0, 2.0], [1.0, 2.0, 3.0, 6.0]])
  found_PM = advantages.group_advantages(rewards_PM, eps=1.0)
  # Second row: mean 3, deviations -2, -1, 0, 3, variance 14 / 4.
  second_M = np.array([-2.0, -1.0, 0.0, 3.0]) / (np.sqrt(3.5) + 1.0)
  np.testing.assert_allclose(found_PM[0], [-0.5, -0.5, 0.5, 0.5], rtol=1e-12)
  np.testing.assert_allclose(found_PM[1], second_M, rtol=1e-12)


@pytest.mark.parametrize("reward", [0.1, 1.0 / 3.0, 7.3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rewards_give_exactly_zero(reward, dtype):
  rewards_PM = np.full((1, 7), reward, dtype)
  assert (advantages.group_advantages(rewards_PM) == 0.0).all()


def test_groups_of_one_are_refused():
  with pytest.raises(ValueError, match=r"config\.coordinator\.group_size"):
    advantages.group_advantages(np.ones((3, 1)))


def test_rewards_that_are_not_finite_are_refused():
  with pytest.raises(ValueError, match=r"config\.task\.reward"):
    advantages.group_advantages(np.array([[0.0, np.nan]]))
