"""Packing keeps every token exactly once, whatever the lengths."""

import itertools

import hypothesis
import numpy as np
from hypothesis import strategies as st

from dora_jax import types
from dora_jax.trainer import advantages, packing


@st.composite
def group_sizes(draw):
  """A shape of rows, and (prompt length, members) of groups that fit."""
  row_length = draw(st.integers(2, 20))
  groups = []
  for _ in range(draw(st.integers(1, 4))):
    num_prompt = draw(st.integers(1, row_length - 1))
    member = st.tuples(
      st.integers(1, row_length - num_prompt),  # tokens of the completion
      st.integers(0, 3),  # version
      st.integers(0, 2),  # reward
    )
    groups.append((num_prompt, draw(st.lists(member, min_size=2, max_size=4))))
  return groups, row_length, draw(st.integers(1, 3))


# Records are made outside of the strategy: what checks their types draws random
# numbers, which hypothesis forbids inside.
def _make_groups(sizes) -> list[types.Group]:
  """Groups whose tokens are all different."""
  counter = itertools.count(1)
  take = lambda count: np.fromiter(counter, np.int32, count)
  groups = []
  for group_id, (num_prompt, members) in enumerate(sizes):
    prompt = take(num_prompt)
    trajectories = []
    for member, (length, version, _) in enumerate(members):
      completion = take(length)
      trajectories.append(
        types.Trajectory(
          group_id=group_id,
          member=member,
          version=version,
          token_versions=np.full(length, version),
          prompt=prompt,
          completion=completion,
          # Tells the token: what is packed beside it can be checked.
          behavior_logprobs=(-completion).astype(np.float32),
          kept_mass=np.ones(len(completion), np.float32),
          finish_reason="stop",
        )
      )
    groups.append(
      types.Group(
        group_id=group_id,
        prompt=types.Prompt(
          prompt_id=group_id, tokens=prompt, text="", answer=""
        ),
        trajectories=tuple(trajectories),
        rewards=np.array([float(reward) for _, _, reward in members]),
      )
    )
  return groups


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(group_sizes())
def test_every_sequence_is_packed_once_and_whole(case):
  sizes, row_length, rows_per_batch = case
  groups = _make_groups(sizes)
  by_group = [advantages.grpo(group.rewards) for group in groups]
  batches = packing.pack_groups(
    groups,
    advantages=by_group,
    is_trained=[np.ones(len(group.rewards), bool) for group in groups],
    version=3,
    row_length=row_length,
    rows_per_batch=rows_per_batch,
  )
  found = {}
  for batch in batches:
    assert batch.tokens.shape == (rows_per_batch, row_length)
    for row in range(rows_per_batch):
      _collect(batch, row, found)
  expected = {}
  for group, advantages_M in zip(groups, by_group, strict=True):
    for trajectory, advantage in zip(
      group.trajectories, advantages_M, strict=True
    ):
      sequence = (*trajectory.prompt.tolist(), *trajectory.completion.tolist())
      lag = 3 - trajectory.version
      num_prompt = len(trajectory.prompt)
      expected[sequence] = (num_prompt, np.float32(advantage), lag)
  assert found == expected


def _collect(batch: types.PackedBatch, row: int, found: dict) -> None:
  """Reads a row's segments back, checking all that belongs to a token."""
  ids = batch.segment_ids[row]
  num_segments = ids.max()
  # Segments are contiguous and in order, the padding comes last.
  is_padding = ids == 0
  assert (np.diff(ids[~is_padding]) >= 0).all()
  assert (np.diff(is_padding.astype(int)) >= 0).all()
  assert set(ids[~is_padding]) == set(range(1, num_segments + 1))
  mask = batch.loss_mask[row] > 0.0
  for values in (batch.advantages, batch.behavior_logprobs, batch.lags):
    assert not values[row][~mask].any()
  assert not batch.tokens[row][is_padding].any()
  for segment_id in range(1, num_segments + 1):
    inside = ids == segment_id
    tokens = batch.tokens[row][inside]
    sampled = mask[inside]
    num_prompt = int(sampled.argmax())
    assert sampled[num_prompt:].all() and not sampled[:num_prompt].any()
    np.testing.assert_array_equal(
      batch.positions[row][inside], np.arange(len(tokens))
    )
    np.testing.assert_array_equal(
      batch.behavior_logprobs[row][inside & mask], -tokens[num_prompt:]
    )
    (advantage,) = set(batch.advantages[row][inside & mask])
    (lag,) = set(batch.lags[row][inside & mask])
    sequence = tuple(tokens.tolist())
    assert sequence not in found
    found[sequence] = (num_prompt, advantage, lag)
