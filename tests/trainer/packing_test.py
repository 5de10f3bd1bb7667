"""Packing: what it refuses, and one batch worked out by hand."""

import dataclasses
import functools

import numpy as np
import pytest

from dora_jax import types
from dora_jax.trainer import packing
from tests.trainer import tiny


def _pack(groups, *, version=0, row_length=24, rows_per_batch=2):
  return tiny.pack(
    groups,
    version=version,
    row_length=row_length,
    rows_per_batch=rows_per_batch,
  )


def _two_members() -> types.Group:
  def member(index, version, completion, logprobs):
    return types.Trajectory(
      group_id=5,
      member=index,
      version=version,
      token_versions=np.full(len(completion), version),
      prompt=np.array([7, 8]),
      completion=np.array(completion),
      behavior_logprobs=np.array(logprobs, np.float32),
      kept_mass=np.ones(len(completion), np.float32),
      finish_reason="stop",
    )

  prompt = types.Prompt(
    prompt_id=5, tokens=np.array([7, 8]), text="", answer=""
  )
  return types.Group(
    group_id=5,
    prompt=prompt,
    trajectories=(
      member(0, 2, [3], [-1.0]),
      member(1, 3, [4, 5], [-2.0, -3.0]),
    ),
    rewards=np.array([0.0, 2.0]),
  )


def test_two_members_in_one_row():
  (batch,) = packing.pack_groups(
    [_two_members()],
    advantages=[np.array([-0.5, 0.5])],
    is_trained=[np.array([True, True])],
    version=3,
    row_length=8,
    rows_per_batch=1,
  )
  # The longer one first.
  expected = {
    "tokens": [7, 8, 4, 5, 7, 8, 3, 0],
    "positions": [0, 1, 2, 3, 0, 1, 2, 0],
    "segment_ids": [1, 1, 1, 1, 2, 2, 2, 0],
    "loss_mask": [0, 0, 1, 1, 0, 0, 1, 0],
    "advantages": [0, 0, 0.5, 0.5, 0, 0, -0.5, 0],
    "behavior_logprobs": [0, 0, -2, -3, 0, 0, -1, 0],
    "lags": [0, 0, 0, 0, 0, 0, 1, 0],
    "trajectory_ids": [0, 0, 1, 1, 0, 0, 0, 0],
  }
  for name, values in expected.items():
    np.testing.assert_array_equal(getattr(batch, name)[0], values, name)


def test_each_token_has_the_lag_of_its_own_version():
  group = _broken(version=1, token_versions=np.array([1, 3]))
  (batch,) = _pack([group], version=4)
  np.testing.assert_array_equal(batch.lags[0, :8], [0, 0, 3, 1, 0, 0, 2, 0])


def test_mixed_trajectory_is_named_where_one_version_is_needed():
  packing.check_unmixed([_two_members()])
  with pytest.raises(
    ValueError,
    match=r"Group 5, member 1: its version is 1, but versions \[1, 3\] .*"
    r'config\.trainer\.proximal "current" or "loglinear"',
  ):
    packing.check_unmixed([_broken(version=1, token_versions=np.array([3, 1]))])


def test_examples_are_packed_with_their_completions_masked():
  pairs = [(np.array([1, 2]), np.array([3])), (np.array([4]), np.array([5, 6]))]
  batches = packing.pack_examples(pairs, row_length=4, rows_per_batch=2)
  (batch,) = batches
  np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 0], [4, 5, 6, 0]])
  np.testing.assert_array_equal(batch.loss_mask, [[0, 0, 1, 0], [0, 1, 1, 0]])
  np.testing.assert_array_equal(batch.advantages, batch.loss_mask)
  assert not batch.behavior_logprobs.any()


def test_sequence_longer_than_a_row_is_refused():
  with pytest.raises(
    ValueError,
    match=r"member 1: 4 tokens .* a row of 3.*"
    r"config\.trainer\.row_length",
  ):
    _pack([_two_members()], version=3, row_length=3)


# The type checker of the tests would refuse these at construction: they stand
# for what an engine without it may deliver.
def _broken(**changes) -> types.Group:
  group = _two_members()
  trajectory = dataclasses.replace(group.trajectories[1])
  for name, value in changes.items():
    object.__setattr__(trajectory, name, value)
  return dataclasses.replace(
    group, trajectories=(group.trajectories[0], trajectory)
  )


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"behavior_logprobs": np.zeros(3, np.float32)}, "lengths differ"),
    ({"token_versions": np.zeros(1, np.int32)}, "lengths differ"),
    ({"behavior_logprobs": np.array([-1.0, np.nan])}, "nan at index 1"),
    ({"behavior_logprobs": np.array([-np.inf, -1.0])}, "-inf at index 0"),
    ({"behavior_logprobs": np.array([-1.0, 1e-3])}, "0.001 at index 1"),
    ({"kept_mass": np.ones(1, np.float32)}, "lengths differ"),
    ({"kept_mass": np.array([1.0, 0.0])}, "kept from 0.0 to 1.0"),
    ({"kept_mass": np.array([0.5, np.nan])}, "above 0 and at most 1"),
    ({"version": 4}, "sampled by version 4, but version 3"),
    ({"token_versions": np.array([3, 4])}, "token 1 sampled by version 4"),
    ({"token_versions": np.array([2, 3])}, "token 0 sampled by version 2"),
  ],
)
def test_malformed_trajectories_are_refused(changes, message):
  with pytest.raises(ValueError, match=f"Group 5, member 1: .*{message}"):
    _pack([_broken(**changes)], version=3)


def test_empty_parts_are_refused():
  nothing = np.zeros(0, np.int32)
  for pair in [(nothing, np.array([1])), (np.array([1]), nothing)]:
    with pytest.raises(ValueError, match="Pair 0: prompt of"):
      packing.pack_examples([pair], row_length=4, rows_per_batch=1)


def test_nothing_to_train_on_is_refused():
  with pytest.raises(ValueError, match="0 groups"):
    _pack([])
  with pytest.raises(ValueError, match="0 pairs"):
    packing.pack_examples([], row_length=4, rows_per_batch=1)


def test_who_is_not_trained_on_is_left_out():
  arguments = {"version": 3, "row_length": 4, "rows_per_batch": 1}
  pack = functools.partial(
    packing.pack_groups,
    [_two_members()],
    advantages=[np.array([-0.5, 0.5])],
    **arguments,
  )
  (batch,) = pack(is_trained=[np.array([False, True])])
  assert batch.tokens.tolist() == [[7, 8, 4, 5]]
  assert batch.trajectory_ids.tolist() == [[0, 0, 1, 1]]
  assert pack(is_trained=[np.array([False, False])]) == []


def test_packing_is_deterministic():
  groups = tiny.make_groups(5)
  for first, second in zip(_pack(groups), _pack(groups), strict=True):
    for field in dataclasses.fields(first):
      np.testing.assert_array_equal(
        getattr(first, field.name), getattr(second, field.name)
      )
