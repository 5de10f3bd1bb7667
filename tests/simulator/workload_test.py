"""Lengths: their mean, where they come from, what they depend on."""

import json

import numpy as np
import pytest

from dora_jax.simulator import workload


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0, 1.5])
def test_the_cut_mean_is_the_one_that_was_asked_for(sigma):
  median = workload.median_for_mean(mean=2250.0, sigma=sigma, limit=30_720)
  z = np.random.default_rng(0).standard_normal(1_000_000)
  drawn = np.minimum(median * np.exp(sigma * z), 30_720)
  assert drawn.mean() == pytest.approx(2250, rel=0.01)


def test_a_mean_beyond_the_limit_is_refused():
  with pytest.raises(ValueError, match=r"config\.workload\.mean_length"):
    workload.median_for_mean(mean=100.0, sigma=1.0, limit=100)


def make(lengths, **changes):
  values = {
    "lengths": lengths,
    "max_length": 100,
    "growth": 0.0,
    "prompt_tokens": 10,
    "turns": workload.Turns(
      num_turns=1, pause_s=0.0, pause_sigma=0.0, observation_tokens=0
    ),
    "reward_s": 2.0,
    "reward_sigma": 0.5,
    "seed": 0,
  }
  return workload.Workload(**{**values, **changes})


def test_a_group_is_the_same_whenever_it_is_asked_for():
  lengths = workload.LogNormal(median=30.0, sigma=1.0, seed=3)
  work = make(lengths)
  first = [work.group_lengths(group_id, 4, 0) for group_id in range(20)]
  again = [work.group_lengths(group_id, 4, 0) for group_id in range(19, -1, -1)]
  assert first == again[::-1]
  assert len({tuple(group) for group in first}) == 20
  assert all(1 <= length <= 100 for group in first for length in group)


def test_rewards_take_their_mean_and_depend_on_their_request_alone():
  work = make(workload.LogNormal(median=30.0, sigma=1.0, seed=3))
  drawn = [
    work.reward_delay_s(group, m) for group in range(500) for m in (0, 1)
  ]
  assert np.mean(drawn) == pytest.approx(2.0, rel=0.05)
  assert work.reward_delay_s(7, 1) == drawn[15]


def test_a_file_gives_its_own_groups_and_resamples_for_others(tmp_path):
  path = tmp_path / "costs.json"
  path.write_text(json.dumps({"lengths": {"0": [5, 6], "3": [7, 8]}}))
  lengths = workload.read_lengths(path, seed=0)
  assert lengths.draw(3, 2) == [7.0, 8.0]
  assert set(lengths.draw(1, 50)) <= {5.0, 6.0, 7.0, 8.0}
  # A group of another size cannot be the same.
  assert len(lengths.draw(3, 5)) == 5


def test_a_text_file_holds_a_length_a_line(tmp_path):
  path = tmp_path / "lengths.txt"
  path.write_text("12\n12\n12\n")
  assert workload.read_lengths(path, seed=0).draw(0, 3) == [12.0] * 3
  path.write_text("0\n")
  with pytest.raises(ValueError, match="lengths_file"):
    workload.read_lengths(path, seed=0)
