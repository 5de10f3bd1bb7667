"""Losses and their gradients against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.trainer import losses

LN2 = float(np.log(2.0))


def _loss_and_gradient(logprob, behavior, advantage):
  cells = [
    jnp.array([[x]], jnp.float32) for x in (logprob, behavior, advantage)
  ]

  def loss(*cells):
    return losses.ppo_clip(*cells, clip_low=0.2, clip_high=0.3)[0][0, 0]

  value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))(*cells)
  # Neither the behavior policy nor the advantage carries a gradient.
  assert gradients[1] == 0.0 and gradients[2] == 0.0
  return float(value), float(gradients[0][0, 0])


@pytest.mark.parametrize(
  "log_ratio, advantage, loss, gradient",
  [
    # On policy: loss -A, and d(-rA) = -rA.
    (0.0, 3.0, -3.0, -3.0),
    # r = 2 > 1.3: a gain is capped, a loss is not.
    (LN2, 1.0, -1.3, 0.0),
    (LN2, -1.0, 2.0, 2.0),
    # r = 1/2 < 0.8: a gain counts as it is, a loss is capped.
    (-LN2, 1.0, -0.5, -0.5),
    (-LN2, -1.0, 0.8, 0.0),
    (-LN2, 0.0, 0.0, 0.0),
  ],
)
def test_ppo_clip_by_hand(log_ratio, advantage, loss, gradient):
  found = _loss_and_gradient(-1.0 + log_ratio, -1.0, advantage)
  np.testing.assert_allclose(found, (loss, gradient), rtol=1e-6, atol=1e-7)


def test_stats_name_the_clipped_tokens():
  logprobs_BT = jnp.array([[LN2, LN2, -LN2, -LN2, 0.0]], jnp.float32) - 1.0
  behavior_BT = jnp.full((1, 5), -1.0)
  advantages_BT = jnp.array([[1.0, -1.0, 1.0, -1.0, 1.0]])
  _, stats = losses.ppo_clip(
    logprobs_BT, behavior_BT, advantages_BT, clip_low=0.2, clip_high=0.3
  )
  assert stats.is_clipped_high_BT.tolist() == [[True] + [False] * 4]
  assert stats.is_clipped_low_BT.tolist() == [[False] * 3 + [True, False]]
  np.testing.assert_allclose(
    stats.log_ratios_BT[0], [LN2, LN2, -LN2, -LN2, 0.0], atol=1e-6
  )


def test_ratio_is_clamped_before_the_exponential():
  # Unclamped, exp(200) would be inf, and inf * 0 NaN.
  loss, gradient = _loss_and_gradient(-1.0, -201.0, -1.0)
  np.testing.assert_allclose(loss, np.exp(20.0), rtol=1e-5)
  assert gradient == 0.0
  assert _loss_and_gradient(-1.0, -201.0, 0.0) == (0.0, 0.0)


def _decoupled(logprob, proximal, behavior, advantage):
  """Loss, its gradient by the log-probability, and the token's stats."""
  cells = [
    jnp.array([[x]], jnp.float32)
    for x in (logprob, proximal, behavior, advantage)
  ]

  def loss(*cells):
    loss_BT, stats = losses.decoupled_ppo(
      *cells, clip_low=0.2, clip_high=0.3, weight_cap=3.0
    )
    return loss_BT[0, 0], stats

  (value, stats), gradients = jax.value_and_grad(
    loss, argnums=(0, 1, 2, 3), has_aux=True
  )(*cells)
  # All but the policy being trained is a constant, the weight too.
  assert not any(gradients[1:])
  return float(value), float(gradients[0][0, 0]), stats


@pytest.mark.parametrize(
  "log_ratio, log_weight, advantage, loss, gradient",
  [
    # At the proximal policy r = 1: loss -wA, and d(-wrA) = -wrA.
    (0.0, 0.0, 3.0, -3.0, -3.0),
    (0.0, LN2, 3.0, -6.0, -6.0),
    (0.0, -LN2, -3.0, 1.5, 1.5),
    # w = 4 is cut to 3.
    (0.0, 2 * LN2, 3.0, -9.0, -9.0),
    # r = 2 > 1.3 and r = 1/2 < 0.8, as in ppo_clip, times w = 2. Against the
    # behavior policy the second token's ratio is 1: the clip does not see it.
    (LN2, LN2, 1.0, -2.6, 0.0),
    (-LN2, LN2, -1.0, 1.6, 0.0),
    (LN2, LN2, -1.0, 4.0, 4.0),
    (-LN2, LN2, 1.0, -1.0, -1.0),
  ],
)
def test_decoupled_ppo_by_hand(
  log_ratio, log_weight, advantage, loss, gradient
):
  found = _decoupled(-3.0 + log_ratio, -3.0, -3.0 - log_weight, advantage)
  np.testing.assert_allclose(found[:2], (loss, gradient), rtol=1e-6, atol=1e-7)
  stats = found[2]
  # The ratio that is reported is that to the behavior policy, weight and all.
  np.testing.assert_allclose(
    stats.log_ratios_BT, [[log_ratio + log_weight]], atol=1e-6
  )
  assert stats.is_capped_BT == (log_weight > np.log(3.0))
  assert stats.is_clipped_high_BT == (log_ratio > 0 and advantage > 0)
  assert stats.is_clipped_low_BT == (log_ratio < 0 and advantage < 0)


def test_decoupled_ppo_around_the_behavior_policy_is_ppo_clip():
  rng = np.random.default_rng(0)
  logprobs_BT, behavior_BT = jnp.asarray(
    -rng.uniform(0.5, 3.0, (2, 3, 5)), jnp.float32
  )
  advantages_BT = jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)
  clip = {"clip_low": 0.2, "clip_high": 0.3}
  found = losses.decoupled_ppo(
    logprobs_BT, behavior_BT, behavior_BT, advantages_BT, weight_cap=1.0, **clip
  )
  expected = losses.ppo_clip(logprobs_BT, behavior_BT, advantages_BT, **clip)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_weight_is_clamped_before_the_exponential():
  # Unclamped, exp(200) would be inf, and inf * 0 NaN.
  assert _decoupled(-1.0, -1.0, -201.0, 0.0)[:2] == (0.0, 0.0)
  loss, gradient, _ = _decoupled(-1.0, -1.0, -201.0, -1.0)
  assert (loss, gradient) == (3.0, 3.0)


def test_gradient_equals_the_numeric_one():
  rng = np.random.default_rng(0)
  logprobs_BT, behavior_BT = -rng.uniform(0.5, 3.0, (2, 3, 5))
  advantages_BT = rng.normal(size=(3, 5))

  @jax.jit
  def loss(logprobs_BT):
    return losses.ppo_clip(
      jnp.asarray(logprobs_BT, jnp.float32),
      jnp.asarray(behavior_BT, jnp.float32),
      jnp.asarray(advantages_BT, jnp.float32),
      clip_low=0.2,
      clip_high=0.3,
    )[0].sum()

  found_BT = jax.grad(loss)(jnp.asarray(logprobs_BT, jnp.float32))
  step = 1e-3
  for index in np.ndindex(logprobs_BT.shape):
    moved = np.zeros_like(logprobs_BT)
    moved[index] = step
    slope = (loss(logprobs_BT + moved) - loss(logprobs_BT - moved)) / (2 * step)
    np.testing.assert_allclose(found_BT[index], slope, atol=2e-2)


def test_supervised_is_the_negative_log_likelihood():
  loss_BT = losses.supervised(jnp.array([[-1.5, -0.25]]))
  assert loss_BT.tolist() == [[1.5, 0.25]]


def test_masked_sum_ignores_what_is_masked():
  values_BT = jnp.array([[1.0, jnp.nan, 2.0, jnp.inf]])
  mask_BT = jnp.array([[1.0, 0.0, 1.0, 0.0]])
  assert losses.sum_where(values_BT, mask_BT) == 3.0
