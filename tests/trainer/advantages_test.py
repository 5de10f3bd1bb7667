"""Advantages against numbers worked out by hand."""

import itertools

import numpy as np
import pytest

from dora_jax.trainer import advantages


def _settings(kind, *, pass_k=2, per_version=False):
  return advantages.Settings(kind=kind, pass_k=pass_k, per_version=per_version)


def _found(kind, *rewards, versions=None, **options):
  return advantages.advantages(
    [np.array(group, np.float64) for group in rewards],
    versions or [0] * len(rewards),
    _settings(kind, **options),
  )


def test_grpo_centers_and_scales_each_group():
  # Mean 1, deviations -1, -1, 1, 1: std 1, the eps of 1 halves them.
  found = advantages.grpo(np.array([0.0, 0.0, 2.0, 2.0]), eps=1.0)
  np.testing.assert_allclose(found, [-0.5, -0.5, 0.5, 0.5], rtol=1e-12)
  # Mean 3, deviations -2, -1, 0, 3, variance 14 / 4; another size of group.
  first, second = _found("grpo", [1.0, 2.0, 3.0, 6.0], [0.0, 1.0])
  scale = np.sqrt(3.5) + 1e-6
  np.testing.assert_allclose(first, np.array([-2, -1, 0, 3]) / scale)
  np.testing.assert_allclose(second, [-1.0, 1.0], rtol=1e-5)


def test_dr_grpo_only_centers():
  assert _found("dr_grpo", [1.0, 2.0, 6.0])[0].tolist() == [-2.0, -1.0, 3.0]


def test_rloo_takes_off_the_mean_of_the_others():
  # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
  found = _found("rloo", [1.0, 2.0, 6.0])[0]
  np.testing.assert_allclose(found, [-3.0, -1.5, 4.5])


def test_reinforce_pp_normalizes_the_batch():
  # 0, 2, 2, 4: mean 2, variance 8 / 4.
  found = _found("reinforce_pp", [0.0, 2.0], [2.0, 4.0])
  np.testing.assert_allclose(found[0], [-np.sqrt(2.0), 0.0], atol=1e-5)
  np.testing.assert_allclose(found[1], [0.0, np.sqrt(2.0)], atol=1e-5)
  # After the groups' means: -1, 1, -2, 2, 0, 0, of variance 10 / 6.
  found = _found("reinforce_pp_baseline", [0.0, 2.0], [3.0, 7.0], [5.0, 5.0])
  np.testing.assert_allclose(found[1], [-2.0, 2.0] / np.sqrt(5 / 3), rtol=1e-5)
  assert found[2].tolist() == [0.0, 0.0]


def test_versions_are_normalized_apart_where_asked():
  rewards = [[0.0, 2.0], [10.0, 30.0], [1.0, 1.0]]
  versions = [3, 4, 3]
  apart = _found("reinforce_pp", *rewards, versions=versions, per_version=True)
  # Version 3: 0, 2, 1, 1, of mean 1 and variance 1 / 2; version 4 by itself.
  np.testing.assert_allclose(apart[0], [-np.sqrt(2), np.sqrt(2)], rtol=1e-5)
  np.testing.assert_allclose(apart[1], [-1.0, 1.0], rtol=1e-5)
  together = _found("reinforce_pp", *rewards, versions=versions)
  assert together[0][1] < 0.0


@pytest.mark.parametrize("num_right", [1, 2, 3])
def test_pass_at_k_equals_the_mean_over_all_sets(num_right):
  """The slow way: every set of 3 of 5 members, normalized, averaged."""
  rewards = np.array([1.0] * num_right + [0.0] * (5 - num_right))
  sets = list(itertools.combinations(range(5), 3))
  passes = np.array([rewards[list(each)].max() for each in sets])
  if passes.std() == 0.0:
    expected = np.zeros(5)
  else:
    values = (passes - passes.mean()) / passes.std()
    expected = [
      np.mean([v for v, each in zip(values, sets, strict=True) if m in each])
      for m in range(5)
    ]
  found = _found("pass_at_k", rewards, pass_k=3)[0]
  np.testing.assert_allclose(found, expected, atol=1e-12)


def test_pass_at_k_needs_rewards_of_0_or_1():
  with pytest.raises(ValueError, match=r"0 or 1, found \[0.5, 1.0\]"):
    _found("pass_at_k", [0.5, 1.0])


@pytest.mark.parametrize("reward", [0.1, 1.0 / 3.0, 7.3])
@pytest.mark.parametrize(
  "kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"]
)
def test_equal_rewards_give_exactly_zero(reward, kind):
  found = _found(kind, [reward] * 7, [0.0, 1.0])[0]
  assert (found == 0.0).all()


@pytest.mark.parametrize("num_right", [0, 4])
def test_pass_at_k_of_equal_rewards_is_zero(num_right):
  rewards = [1.0] * num_right + [0.0] * (4 - num_right)
  assert (_found("pass_at_k", rewards)[0] == 0.0).all()


def test_a_batch_of_equal_rewards_is_zero():
  found = _found("reinforce_pp", [0.1] * 3, [0.1] * 3)
  assert not np.concatenate(found).any()


def test_groups_of_one_are_refused():
  with pytest.raises(ValueError, match=r"config\.coordinator\.group_size"):
    _found("grpo", [1.0])
  found = _found("reinforce_pp", [0.0], [2.0])
  np.testing.assert_allclose(np.concatenate(found), [-1.0, 1.0], rtol=1e-5)


def test_rewards_that_are_not_finite_are_refused():
  with pytest.raises(ValueError, match=r"config\.task\.reward"):
    _found("grpo", [0.0, np.nan])
