"""The train step: invariant to layout, deterministic, and it learns."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax import types
from dora_jax.trainer import (
  advantages,
  device_batch,
  gradients,
  packing,
  train_step,
)
from dora_jax.trainer.attention import xla
from tests.trainer import tiny


def _assert_params(found, expected, atol):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=atol),
    jax.device_get(found),
    jax.device_get(expected),
  )


def _distance(first, second):
  parts = jax.tree.map(
    lambda x, y: np.abs(np.asarray(x) - np.asarray(y)).max(), first, second
  )
  return max(jax.tree.leaves(parts))


# With all that could depend on what lies beside what: sums over sequences, and
# the denominators of the step.
_BY_SEQUENCE = dataclasses.replace(
  tiny.OBJECTIVE,
  loss="gspo",
  aggregation="sequence_mean",
  entropy_coefficient=0.01,
)


@pytest.fixture(scope="module")
def reference():
  """One step over two micro-batches on one device."""
  trainer = tiny.make_trainer(objective=_BY_SEQUENCE)
  metrics = trainer.train(tiny.make_groups())
  return jax.device_get(trainer.params()), metrics


@pytest.mark.parametrize(
  "changes",
  [
    {"rows_per_batch": 1, "row_length": 64, "logprob_chunk": 64, "remat": True},
    {"mesh": (2, 1, 2)},
    {"mesh": (2, 2, 2)},
  ],
  ids=str,
)
def test_one_step_is_the_same_however_it_is_laid_out(reference, changes):
  if "mesh" in changes:
    changes = changes | {"mesh": tiny.make_mesh(*changes["mesh"])}
  trainer = tiny.make_trainer(objective=_BY_SEQUENCE, **changes)
  metrics = trainer.train(tiny.make_groups())
  params, expected = reference
  assert _distance(params, tiny.make_params()) > 1e-3
  _assert_params(trainer.params(), params, atol=1e-5)
  layout = {"train/padding_share"}
  assert metrics.keys() == expected.keys()
  for name in metrics.keys() - layout:
    np.testing.assert_allclose(
      metrics[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name
    )


# By token and by sequence.
_OBJECTIVES = [
  _BY_SEQUENCE,
  dataclasses.replace(
    tiny.OBJECTIVE,
    proximal="current",
    correction="geometric_mask",
    sequence_floor=0.7,
    sequence_cap=1.4,
  ),
]


@pytest.mark.parametrize("objective", _OBJECTIVES, ids=lambda o: o.loss)
def test_gradient_equals_that_of_sequences_one_by_one(objective):
  groups, params = tiny.make_groups(), tiny.make_params()
  settings = gradients.LossSettings(
    config=tiny.CONFIG,
    objective=objective,
    temperature=0.7,
    attention=xla.XlaAttention(),
    compute_dtype=jnp.float32,
    logprob_chunk=8,
    remat=False,
    unrolls=False,
    hidden_sharding=None,
  )
  trajectories = [t for group in groups for t in group.trajectories]
  denominator = np.float32(sum(len(t.completion) for t in trajectories))

  @jax.jit
  def gradient(params, batch):
    return jax.grad(gradients.policy_loss, has_aux=True)(
      params, batch, denominator, settings=settings
    )[0]

  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  (packed,) = tiny.pack(groups, row_length=32, rows_per_batch=8)
  found = gradient(params, device_batch.put(packed, device))
  expected = jax.tree.map(jnp.zeros_like, params)
  for group in groups:
    values = advantages.grpo(group.rewards)
    for trajectory, value in zip(group.trajectories, values, strict=True):
      pair = (trajectory.prompt, trajectory.completion)
      (alone,) = packing.pack_examples([pair], row_length=32, rows_per_batch=1)
      alone.advantages[alone.loss_mask > 0.0] = value
      alone.behavior_logprobs[alone.loss_mask > 0.0] = (
        trajectory.behavior_logprobs
      )
      one = gradient(params, device_batch.put(alone, device))
      expected = jax.tree.map(jnp.add, expected, one)
  _assert_params(found, expected, atol=1e-6)
  # What stands at masked positions has no influence, not even a NaN.
  masked = packed.loss_mask == 0.0
  packed.advantages[masked] = np.nan
  packed.behavior_logprobs[masked] = np.inf
  poisoned = gradient(params, device_batch.put(packed, device))
  _assert_params(poisoned, found, atol=0.0)


def test_two_runs_are_bitwise_equal():
  def run():
    trainer = tiny.make_trainer(mesh=tiny.make_mesh(2, 2, 2))
    metrics = [
      trainer.train(tiny.make_groups(seed=seed, version=0)) for seed in range(2)
    ]
    return jax.device_get(trainer.params()), metrics

  (first, first_metrics), (second, second_metrics) = run(), run()
  assert first_metrics == second_metrics
  _assert_params(first, second, atol=0.0)


def test_gradient_that_is_not_finite_changes_nothing():
  params = tiny.make_params()
  params["embed"] = params["embed"].at[3, 0].set(jnp.inf)
  trainer = tiny.make_trainer(params=params)
  before = jax.device_get(trainer.state())
  metrics = trainer.train(tiny.make_groups())
  assert metrics["train/nonfinite_steps"] == 1.0
  assert (trainer.version, trainer.skipped) == (0, train_step.NONFINITE)
  for x, y in zip(
    jax.tree.leaves(trainer.state()), jax.tree.leaves(before), strict=True
  ):
    np.testing.assert_array_equal(x, y)


def test_callers_params_stay_valid_and_nothing_recompiles():
  params = tiny.make_params()
  trainer = tiny.make_trainer(params=params, rows_per_batch=1)
  # They make 3, 6 and 13 micro-batches, hence programs for 4, 8 and 16.
  for num_groups in (1, 2, 5):
    trainer.train(tiny.make_groups(num_groups))
  policy = trainer._policy
  sums: Any = policy._accumulation
  functions: list[Any] = [sums._zeros, sums._stack, sums._scan, policy._update]
  num_compiled = [function._cache_size() for function in functions]
  for num_groups in (5, 2, 4, 1):
    trainer.train(tiny.make_groups(num_groups))
  assert [function._cache_size() for function in functions] == num_compiled
  _assert_params(params, tiny.make_params(), atol=0.0)


def test_metrics_on_policy():
  """Behavior log-probabilities from the trainer itself: all ratios are one."""
  trainer = tiny.make_trainer()
  groups = _with_own_logprobs(trainer, tiny.make_groups())
  metrics = trainer.train(groups)
  assert trainer.version == 1
  rewards = np.concatenate([group.rewards for group in groups])
  lengths = np.array(
    [len(t.completion) for group in groups for t in group.trajectories]
  )
  is_rewarded = rewards > rewards.mean()
  expected = {
    "ratio_min": 1.0,
    "ratio_p50": 1.0,
    "ratio_max": 1.0,
    "ess": 1.0,
    "kl_behavior_k1": 0.0,
    "kl_behavior_k3": 0.0,
    "chi2": 0.0,
    "masked_share": 0.0,
    "worst_kl": 0.0,
    "mismatch_kl_k3": 0.0,
    "clip_share_low": 0.0,
    "clip_share_high": 0.0,
    "weight_capped_share": 0.0,
    "num_tokens": lengths.sum(),
    "reward_mean": rewards.mean(),
    "length_mean": lengths.mean(),
    "length_mean_rewarded": lengths[is_rewarded].mean(),
    "length_mean_unrewarded": lengths[~is_rewarded].mean(),
    "lag_max": 0.0,
    "lag_count/0": 12.0,
    "truncated_share": 0.25,
    "zero_advantage_groups": 0.0,
    "nonfinite_steps": 0.0,
    "lr": 1e-2,
  }
  for name, value in expected.items():
    np.testing.assert_allclose(
      metrics[f"train/{name}"], value, atol=1e-5, err_msg=name
    )
  assert metrics["train/ratio_one_share"] > 0.1
  # One version later, the same groups have a lag and another distribution.
  later = trainer.train(groups)
  assert later["train/lag_count/1"] == 12.0
  assert later["train/lag_count/0"] == 0.0
  assert "train/mismatch_kl_k3" not in later
  assert later["train/kl_behavior_k3"] > 1e-5


_DECOUPLED = dataclasses.replace(
  tiny.OBJECTIVE, proximal="current", correction="tis"
)


def test_losses_agree_on_policy_and_the_decoupled_one_weights_the_rest():
  clipped = tiny.make_trainer()
  decoupled = tiny.make_trainer(objective=_DECOUPLED)
  groups = _with_own_logprobs(clipped, tiny.make_groups())
  on_policy = clipped.train(groups), decoupled.train(groups)
  _assert_params(decoupled.params(), clipped.params(), atol=1e-6)
  assert on_policy[0].keys() == on_policy[1].keys()
  # A weight of 4 is cut to 2 at every token; the ratio reported is not.
  far = [_shifted(group, -np.log(4.0)) for group in groups]
  fresh = tiny.make_trainer(objective=_DECOUPLED)
  metrics = fresh.train(far)
  assert metrics["train/weight_capped_share"] == 1.0
  assert metrics["train/clip_share_high"] == 0.0
  np.testing.assert_allclose(metrics["train/ratio_p50"], 4.0, rtol=1e-5)
  np.testing.assert_allclose(
    metrics["train/grad_norm"],
    2.0 * on_policy[1]["train/grad_norm"],
    rtol=1e-4,
  )


def _shifted(group, nats) -> types.Group:
  return dataclasses.replace(
    group,
    trajectories=tuple(
      dataclasses.replace(t, behavior_logprobs=t.behavior_logprobs + nats)
      for t in group.trajectories
    ),
  )


def test_tokens_of_several_versions_need_the_decoupled_loss():
  groups = tiny.make_groups()
  mixed = groups[1].trajectories[2]
  mixed.token_versions[-1] = 1
  trainers = [
    tiny.make_trainer(objective=objective, version=1)
    for objective in (tiny.OBJECTIVE, _DECOUPLED)
  ]
  with pytest.raises(ValueError, match="Group 1, member 2: its version is 0"):
    trainers[0].train(groups)
  metrics = trainers[1].train(groups)
  # A trajectory counts by its oldest version, a token by its own.
  assert metrics["train/lag_count/1"] == 12.0
  assert "train/mismatch_kl_k3" in metrics


def _with_own_logprobs(trainer, groups) -> list[types.Group]:
  def recorded(trajectory):
    tokens = np.concatenate([trajectory.prompt, trajectory.completion])
    logprobs = trainer.logprobs_of(trainer.params(), tokens)
    return dataclasses.replace(
      trajectory, behavior_logprobs=logprobs[len(trajectory.prompt) :]
    )

  return [
    dataclasses.replace(
      group, trajectories=tuple(recorded(t) for t in group.trajectories)
    )
    for group in groups
  ]


def test_policy_training_raises_the_rewarded_completion():
  trainer = tiny.make_trainer()
  (group,) = tiny.make_groups(1)
  group = dataclasses.replace(group, rewards=np.array([0.0, 0.0, 1.0, 0.0]))
  before = _likelihoods(trainer, group)
  for _ in range(4):
    (fresh,) = _with_own_logprobs(trainer, [group])
    trainer.train([fresh])
  gain = _likelihoods(trainer, group) - before
  assert gain[2] > 0.5
  assert gain[2] > gain[[0, 1, 3]].max()


def _likelihoods(trainer, group):
  (group,) = _with_own_logprobs(trainer, [group])
  return np.array([t.behavior_logprobs.mean() for t in group.trajectories])


def test_supervised_phase_learns_and_makes_no_version():
  trainer = tiny.make_trainer()
  pair = (np.array([1, 2, 3]), np.array([4, 5, 6]))
  losses = [
    trainer.train_supervised([pair])["supervised/loss"] for _ in range(12)
  ]
  assert losses[-1] < 0.3 * losses[0]
  assert trainer.version == 0
  logprobs = trainer.logprobs_of(trainer.params(), np.concatenate(pair))
  assert logprobs[0] == 0.0 and -logprobs[3:].mean() < losses[-1]
  # The first policy step is that of a trainer which never had such a phase.
  fresh = tiny.make_trainer(params=jax.device_get(trainer.params()))
  groups = tiny.make_groups()
  assert trainer.train(groups) == fresh.train(groups)
  _assert_params(trainer.params(), fresh.params(), atol=0.0)
  with pytest.raises(RuntimeError, match=r"config\.cold_start\.steps"):
    trainer.train_supervised([pair])


def test_bfloat16_compute_keeps_float32_masters():
  trainer = tiny.make_trainer(compute_dtype=jnp.bfloat16)
  trainer.train(tiny.make_groups())
  dtypes = {x.dtype for x in jax.tree.leaves(trainer.params())}
  assert dtypes == {np.dtype(np.float32)}


@pytest.mark.parametrize(
  "changes, fields",
  [
    (
      {"mesh": (4, 1, 1), "rows_per_batch": 6},
      r"6 rows .* 4 devices.*trainer\.rows_per_batch.*mesh\.trainer_fsdp",
    ),
    ({"temperature": 0.0}, r"config\.generator\.temperature"),
    (
      {"mesh": (1, 4, 1), "row_length": 22},
      r"22 tokens .* 4 devices.*trainer\.row_length.*mesh\.trainer_sequence",
    ),
    ({"mesh": (1, 1, 8)}, r"config\.mesh\.trainer_tensor"),
  ],
)
def test_settings_that_cannot_work_are_refused(changes, fields):
  if "mesh" in changes:
    changes = changes | {"mesh": tiny.make_mesh(*changes["mesh"])}
  with pytest.raises(ValueError, match=fields):
    tiny.make_trainer(**changes)


def test_tokens_outside_the_vocabulary_are_refused():
  with pytest.raises(ValueError, match="from 0 to 16, but the model knows"):
    tiny.make_trainer().train_supervised([(np.array([1]), np.array([16]))])


def test_the_step_recomputes_what_versions_thought_and_keeps_a_reference():
  """Tokens of two versions, each recorded by the trainer's own forward."""
  objective = dataclasses.replace(
    tiny.OBJECTIVE,
    proximal="recomputed",
    correction="icepop",
    kl="k3_straight_through",
  )
  trainer = tiny.make_trainer(objective=objective, recomputes_logprobs=True)
  first, second, third = _with_own_logprobs(trainer, tiny.make_groups())
  metrics = trainer.train([first])
  # The reference is what this step started from.
  np.testing.assert_allclose(metrics["train/kl_ref"], 0.0, atol=1e-6)
  (fresh,) = _with_own_logprobs(trainer, [second])
  fresh = _of_version(fresh, 1)
  # The engine of version 0 makes all of a trajectory's tokens e^0.8 likelier.
  members = list(third.trajectories)
  members[2] = dataclasses.replace(
    members[2], behavior_logprobs=members[2].behavior_logprobs - 0.8
  )
  third = dataclasses.replace(third, trajectories=tuple(members))
  metrics = trainer.train([fresh, third])
  length = len(members[2].completion)
  share = length / metrics["train/num_tokens"]
  k3 = np.exp(0.8) - 1.0 - 0.8
  expected = {
    "mismatch_kl_k1": -0.8 * share,
    "mismatch_kl_k3": k3 * share,
    "mismatch_chi2": (np.exp(1.6) - 1.0) * share,
    "mismatch_ratio_p50": 1.0,
    "mismatch_ratio_max": np.exp(0.8),
    # e^0.8 is above the cap of 2: these tokens are left out.
    "masked_share": share,
    "worst_kl": k3,
    "worst_group_id": 2.0,
    "worst_member": 2.0,
  }
  for name, value in expected.items():
    np.testing.assert_allclose(
      metrics[f"train/{name}"], value, rtol=1e-4, atol=1e-5, err_msg=name
    )
  assert metrics["train/kl_ref"] > 1e-5
  late = tiny.make_trainer(
    objective=objective, recomputes_logprobs=True, version=3
  )
  with pytest.raises(RuntimeError, match=r"Step 3 .*config\.trainer\.kl"):
    late.train([first])


def _of_version(group, version) -> types.Group:
  return dataclasses.replace(
    group,
    trajectories=tuple(
      dataclasses.replace(
        t,
        version=version,
        token_versions=np.full(len(t.completion), version, np.int32),
      )
      for t in group.trajectories
    ),
  )


def test_a_step_of_truncated_completions_changes_nothing():
  settings = dataclasses.replace(tiny.SHAPING, masks_truncated=True)
  trainer = tiny.make_trainer(shaping=settings)
  (group,) = tiny.make_groups(1)
  cut = dataclasses.replace(
    group,
    trajectories=tuple(
      dataclasses.replace(t, finish_reason="length") for t in group.trajectories
    ),
  )
  metrics = trainer.train([cut])
  assert (trainer.version, trainer.skipped) == (0, train_step.NO_TOKEN)
  assert metrics["train/empty_steps"] == metrics["train/untrained_share"] == 1.0
  _assert_params(trainer.params(), tiny.make_params(), atol=0.0)
