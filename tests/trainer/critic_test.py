"""The critic: what it sees, what it makes of it, and that it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.trainer import (
  advantages,
  critic,
  device_batch,
  gradients,
  lora,
  packing,
  returns,
)
from tests.trainer import tiny

_SETTINGS = critic.Settings(
  kind="gae",
  discount=1.0,
  trace_decay=1.0,
  weight_cap=2.0,
  value_clip=0.2,
  num_updates=2,
  optimizer=dataclasses.replace(tiny.OPTIMIZER, lr=3e-3),
)
_GAE = advantages.Settings(kind="gae", pass_k=1, per_version=False)


def _make_trainer(**changes):
  changes = {"critic": _SETTINGS, "advantage": _GAE} | changes
  return tiny.make_trainer(**changes)


def _pack(groups):
  """With the rewards in place of advantages, as a step does for a critic."""
  return packing.pack_groups(
    groups,
    advantages=[group.rewards for group in groups],
    is_trained=[np.ones(len(group.rewards), bool) for group in groups],
    version=0,
    row_length=24,
    rows_per_batch=4,
  )


def _sampled(batches, arrays):
  return np.concatenate(
    [x[b.loss_mask > 0.0] for b, x in zip(batches, arrays, strict=True)]
  )


@pytest.fixture(scope="module")
def trainer():
  """One that no test trains."""
  return _make_trainer()


def test_at_first_a_token_counts_by_the_reward_of_its_trajectory(trainer):
  groups = tiny.make_groups()
  batches = _pack(groups)
  assert len(batches) > 1
  judge = _make_trainer()._critic
  assert judge is not None
  found, metrics = judge.step(batches, tiny.make_params())
  # All values are 0: without a discount, an advantage is the reward to come.
  rewards = np.concatenate(
    [
      np.repeat(group.rewards, [len(t.completion) for t in group.trajectories])
      for group in groups
    ]
  )
  expected = (rewards - rewards.mean()) / (rewards.std() + advantages.EPS)
  ids = _sampled(batches, [b.trajectory_ids for b in batches])
  order = np.argsort(ids, kind="stable")
  got = _sampled(found, [b.advantages for b in found])
  np.testing.assert_allclose(got[order], expected, rtol=1e-4, atol=1e-5)
  for batch in found:
    assert not batch.advantages[batch.loss_mask == 0.0].any()
  assert metrics["value_mean"] == metrics["explained_variance"] == 0.0
  np.testing.assert_allclose(
    metrics["value_loss"], 0.5 * np.square(rewards).mean(), rtol=1e-5
  )


def test_a_value_speaks_of_what_comes_before_its_token(trainer):
  params = jax.device_get(trainer._critic.optimization.params())
  params["value"] = np.ones(tiny.CONFIG.width, np.float32)
  judge = critic._make_judge(_SETTINGS, trainer._settings)
  (batch, *_) = _pack(tiny.make_groups())
  at = int(np.flatnonzero(batch.loss_mask[0] * batch.segment_ids[0] == 1)[2])

  def values(tokens):
    changed = dataclasses.replace(batch, tokens=tokens)
    arrays = device_batch.put(changed, trainer._rows)
    zeros = jnp.zeros_like(arrays["behavior_logprobs"])
    return np.asarray(judge(params, arrays, zeros).values_BT)

  other = batch.tokens.copy()
  other[0, at] = (other[0, at] + 1) % 16
  before, after = values(batch.tokens), values(other)
  np.testing.assert_array_equal(after[0, : at + 1], before[0, : at + 1])
  assert after[0, at + 1] != before[0, at + 1]
  # Nor does it see other sequences of its row.
  is_first = batch.segment_ids[0] == 1
  np.testing.assert_array_equal(after[0, ~is_first], before[0, ~is_first])
  assert (before[batch.loss_mask == 0.0] == 0.0).all()


def test_it_learns_to_foresee_the_rewards_and_restores():
  trainer, groups = _make_trainer(), tiny.make_groups()
  metrics = [trainer.train(groups) for _ in range(40)]
  first, last = metrics[0], metrics[-1]
  assert first["train/explained_variance"] == 0.0
  assert last["train/explained_variance"] > 0.8
  assert last["train/value_loss"] < 0.2 * first["train/value_loss"]
  state = jax.tree.map(jnp.copy, trainer.state())
  assert int(state.critic.step) == 80
  other = _make_trainer(params=tiny.make_params(seed=9))
  other.restore(state, version=trainer.version)
  assert other.train(groups) == trainer.train(groups)


def test_the_policy_learns_by_the_critic():
  trainer = _make_trainer()
  (group,) = tiny.make_groups(1)
  group = dataclasses.replace(group, rewards=np.array([0.0, 0.0, 1.0, 0.0]))

  def logprobs(trajectory):
    tokens = np.concatenate([trajectory.prompt, trajectory.completion])
    found = trainer.logprobs_of(trainer.params(), tokens)
    return found[len(trajectory.prompt) :]

  def recorded():
    return tuple(
      dataclasses.replace(t, behavior_logprobs=logprobs(t))
      for t in group.trajectories
    )

  before = np.array([logprobs(t).mean() for t in group.trajectories])
  for _ in range(5):
    trainer.train([dataclasses.replace(group, trajectories=recorded())])
  gain = [logprobs(t).mean() for t in group.trajectories] - before
  assert gain[2] > 0.5
  assert gain[2] > gain[[0, 1, 3]].max()


def test_vtrace_weighs_by_the_policy_of_now(trainer):
  # The policy makes each token half as likely as the one that sampled it.
  settings = dataclasses.replace(_SETTINGS, kind="vtrace", discount=0.5)
  judge = critic.Critic(
    settings=settings,
    loss_settings=trainer._settings,
    mesh=trainer._mesh,
    rows=trainer._rows,
    params=tiny.make_params(),
  )
  batches = _pack(tiny.make_groups())
  score = gradients.make_score(trainer._settings, 1.0)
  for batch in batches:
    arrays = device_batch.put(batch, trainer._rows)
    logprobs_BT, _ = score(tiny.make_params(), arrays)
    batch.behavior_logprobs[:] = logprobs_BT + np.log(2.0)
  found, _ = judge.step(batches, tiny.make_params())
  expected = []
  for batch in batches:
    rewards = np.zeros_like(batch.advantages)
    for row, ids in enumerate(batch.segment_ids):
      for segment in range(1, ids.max() + 1):
        at = np.flatnonzero((ids == segment) & (batch.loss_mask[row] > 0.0))
        rewards[row, at[-1]] = batch.advantages[row, at[-1]]
    made = returns.vtrace(
      jnp.full_like(rewards, -np.log(2.0)),
      jnp.asarray(rewards),
      jnp.zeros_like(rewards),
      jnp.asarray(batch.loss_mask),
      jnp.asarray(batch.segment_ids),
      discount=0.5,
      weight_cap=2.0,
    )
    expected.append(np.asarray(made.advantages_BT))
  expected = _sampled(batches, expected)
  expected = (expected - expected.mean()) / expected.std()
  got = _sampled(found, [b.advantages for b in found])
  np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
  "kind, shape", [("gae", (2, 1, 2)), ("vtrace", (2, 2, 2))]
)
def test_steps_of_all_kinds_are_the_same_on_several_devices(kind, shape):
  """Pairs first; then adapters, a critic, a reference, logprobs once more."""
  changes = {
    "critic": dataclasses.replace(_SETTINGS, kind=kind),
    "advantage": dataclasses.replace(_GAE, kind=kind),
    "adapters": lora.Settings(
      rank=2, alpha=4.0, targets=("query", "up"), seed=0
    ),
    "objective": dataclasses.replace(
      tiny.OBJECTIVE, proximal="recomputed", correction="tis", kl="k3"
    ),
    "recomputes_logprobs": True,
  }

  def run(mesh):
    trainer = tiny.make_trainer(mesh=mesh, **changes)
    pair = (np.array([1, 2, 3]), np.array([4, 5, 6]))
    metrics = [trainer.train_supervised([pair])]
    metrics += [trainer.train(tiny.make_groups(seed=seed)) for seed in range(2)]
    return metrics, jax.device_get(trainer.state())

  found, expected = run(tiny.make_mesh(*shape)), run(tiny.make_mesh())
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4),
    found,
    expected,
  )
