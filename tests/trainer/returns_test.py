"""GAE, V-trace and the critic's loss against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.trainer import returns


def _row(values):
  return jnp.asarray(values, jnp.float32)[None]


def test_gae_by_hand_passes_over_what_was_not_sampled():
  # Two sequences in a row and padding. The first has a token of the environment
  # between its two sampled ones; what stands there has no say.
  found = returns.gae(
    _row([0.0, 9.0, 1.0, 4.0, 9.0]),
    _row([0.5, 9.0, 0.25, 2.0, 9.0]),
    _row([1.0, 0.0, 1.0, 1.0, 0.0]),
    jnp.array([[1, 1, 1, 2, 0]]),
    discount=0.5,
    trace_decay=0.8,
  )
  # Last: 1 - 0.25. First: 0 + 0.5 * 0.25 - 0.5 + 0.4 * 0.75. Second: 4 - 2.
  expected = np.array([-0.375 + 0.3, 0.0, 0.75, 2.0, 0.0])
  values = np.array([0.5, 0.0, 0.25, 2.0, 0.0])
  np.testing.assert_allclose(found.advantages_BT[0], expected, atol=1e-6)
  np.testing.assert_allclose(found.targets_BT[0], expected + values, atol=1e-6)


def test_vtrace_by_hand():
  # Ratios 4 and 1/2, cap 2. Last: V = 1, delta = 3 - 1 = 2, v = 1 + 1/2 * 2.
  # First: V = 0.5, delta = 1 - 0.5, rho = 2, c = 1: v = 0.5 + 2 * 0.5 + 1.
  found = returns.vtrace(
    jnp.log(_row([4.0, 0.5])),
    _row([0.0, 3.0]),
    _row([0.5, 1.0]),
    _row([1.0, 1.0]),
    jnp.ones((1, 2), jnp.int32),
    discount=1.0,
    weight_cap=2.0,
  )
  np.testing.assert_allclose(found.targets_BT[0], [2.5, 2.0], rtol=1e-6)
  # r + v_{t+1} - V: 0 + 2 - 0.5, and 3 + 0 - 1.
  np.testing.assert_allclose(found.advantages_BT[0], [1.5, 2.0], rtol=1e-6)


def test_vtrace_on_policy_is_gae_without_decay():
  rng = np.random.default_rng(0)
  rewards_BT, values_BT = jnp.asarray(rng.normal(size=(2, 3, 9)), jnp.float32)
  mask_BT = jnp.asarray(rng.integers(0, 2, (3, 9)), jnp.float32)
  ids_BT = jnp.array([[1] * 4 + [2] * 3 + [0] * 2] * 3)
  batch = rewards_BT, values_BT, mask_BT, ids_BT
  gae = returns.gae(*batch, discount=0.9, trace_decay=1.0)
  vtrace = returns.vtrace(
    jnp.zeros((3, 9)), *batch, discount=0.9, weight_cap=1.0
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), gae, vtrace
  )


@pytest.mark.parametrize(
  "value, loss, gradient",
  [
    # Target 2, value before 1, clip 0.5.
    (1.2, 0.32, -0.8),
    # Beyond the clip at 1.5 the larger loss counts, and stands still.
    (1.8, 0.125, 0.0),
    (0.2, 1.62, -1.8),
  ],
)
def test_value_loss_by_hand(value, loss, gradient):
  def total(value):
    return returns.value_loss(
      value.reshape(1, 1), _row([1.0]), _row([2.0]), value_clip=0.5
    )[0, 0]

  found = jax.value_and_grad(total)(jnp.float32(value))
  np.testing.assert_allclose(found, (loss, gradient), atol=1e-6)
