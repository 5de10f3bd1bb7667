"""KL estimates: values and mean gradients against the exact KL."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.trainer import regularizers

_LOGITS = {
  "pi": jnp.array([0.3, -0.5, 1.1, 0.0]),
  "ref": jnp.array([-0.2, 0.4, 0.3, 0.1]),
  # Off policy: the tokens come from neither.
  "behavior": jnp.array([0.5, 0.2, -0.3, 0.4]),
}


def _logprobs(name):
  return jax.nn.log_softmax(_LOGITS[name])


def _kl(logits, other_logits):
  """KL of the distributions of two rows of logits, in nats."""
  logs, others = map(jax.nn.log_softmax, (logits, other_logits))
  return jnp.sum(jnp.exp(logs) * (logs - others))


def _mean_estimate(kind, logits, sampled_from):
  """The estimate's mean over tokens of the sampling distribution, exactly."""
  logprobs = jax.nn.log_softmax(logits)
  draws = _logprobs(sampled_from)
  weights = jax.lax.stop_gradient(jnp.exp(logprobs - draws))
  estimate_BT = regularizers.ESTIMATES[kind](
    (logprobs - _logprobs("ref"))[None], weights[None]
  )
  return jnp.sum(jnp.exp(draws) * estimate_BT[0])


@pytest.mark.parametrize("sampled_from", ["pi", "behavior"])
@pytest.mark.parametrize(
  "kind, is_exact, reverses",
  [
    ("k1", True, False),
    ("k2", False, False),
    ("k3", True, True),
    ("k3_straight_through", True, False),
  ],
)
def test_means_are_those_of_the_exact_kl(
  kind, is_exact, reverses, sampled_from
):
  pi, ref = _LOGITS["pi"], _LOGITS["ref"]
  value, gradient = jax.value_and_grad(
    lambda logits: _mean_estimate(kind, logits, sampled_from)
  )(pi)
  exact = _kl(pi, ref)
  if is_exact:
    np.testing.assert_allclose(value, exact, rtol=1e-5)
  else:
    assert abs(value - exact) > 0.05 * exact
  if reverses:
    expected = jax.grad(lambda logits: _kl(ref, logits))(pi)
  else:
    expected = jax.grad(lambda logits: _kl(logits, ref))(pi)
  np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_values_by_hand():
  log_ratios_BT = jnp.log(jnp.array([[2.0, 0.5]]))
  weights_BT = jnp.array([[1.0, 3.0]])
  ln2 = np.log(2.0)
  expected = {
    "k1": [ln2, -3 * ln2],
    "k2": [ln2**2 / 2, 3 * ln2**2 / 2],
    # 1/2 - 1 + ln 2, and 2 - 1 - ln 2.
    "k3": [ln2 - 0.5, 3 * (1 - ln2)],
    "k3_straight_through": [ln2 - 0.5, 3 * (1 - ln2)],
  }
  assert expected.keys() == regularizers.ESTIMATES.keys()
  for kind, values in expected.items():
    found_BT = regularizers.ESTIMATES[kind](log_ratios_BT, weights_BT)
    np.testing.assert_allclose(found_BT[0], values, rtol=1e-5, err_msg=kind)
