import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.generator import sampling

_LOGITS_V = np.array([0.3, -1.0, 2.0, 0.0, 1.1], np.float32)


def _sample_many(temperature, num_draws):
  logits_BV = jnp.broadcast_to(_LOGITS_V, (num_draws, len(_LOGITS_V)))
  keys_B = jax.random.split(jax.random.key(0), num_draws)
  temperature_B = jnp.full(num_draws, temperature, jnp.float32)
  return jax.jit(sampling.sample)(logits_BV, keys_B, temperature_B)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_draws_follow_the_distribution_that_the_logprobs_are_of(temperature):
  tokens_B, logprobs_B = _sample_many(temperature, 20_000)
  probs_V = np.exp(_LOGITS_V / temperature)
  probs_V /= probs_V.sum()
  shares_V = np.bincount(tokens_B, minlength=len(_LOGITS_V)) / 20_000
  # Four deviations of a binomial share with 20,000 draws are at most 0.0142.
  np.testing.assert_allclose(shares_V, probs_V, atol=0.0142)
  np.testing.assert_allclose(
    logprobs_B, np.log(probs_V)[np.asarray(tokens_B)], atol=1e-6
  )


def test_temperature_zero_takes_the_likeliest_at_its_untempered_logprob():
  tokens_B, logprobs_B = _sample_many(0.0, 3)
  expected = 2.0 - np.log(np.exp(_LOGITS_V).sum())
  assert tokens_B.tolist() == [2, 2, 2]
  np.testing.assert_allclose(logprobs_B, expected, atol=1e-6)


def test_a_logprob_is_never_above_zero():
  logits_BV = jnp.array([[1e4, 0.0, -1e4], [-3e4, -3e4, -1e4]], jnp.float32)
  keys_B = jax.random.split(jax.random.key(0), 2)
  _, logprobs_B = sampling.sample(logits_BV, keys_B, jnp.array([1.0, 0.01]))
  assert logprobs_B.tolist() == [0.0, 0.0]


def test_logits_of_less_than_fp32_are_refused():
  with pytest.raises(TypeError, match="bfloat16"):
    sampling.sample(
      jnp.zeros((1, 3), jnp.bfloat16),
      jax.random.split(jax.random.key(0), 1),
      jnp.ones(1),
    )


def test_a_draw_depends_on_each_of_its_counters_and_on_nothing_else():
  counters = list(itertools.product(range(2), range(3), range(3), range(3)))
  draw = jax.jit(
    lambda seed, *counters: jax.random.bits(
      sampling.draw_key(jax.random.key(seed), *counters)
    )
  )
  draws = {
    (seed, *names): int(draw(jnp.int32(seed), *map(jnp.int32, names)))
    for seed in (0, 1)
    for names in counters
  }
  assert len(set(draws.values())) == len(draws)
  again = draw(jnp.int32(1), *map(jnp.int32, (1, 2, 0, 1)))
  assert int(again) == draws[1, 1, 2, 0, 1]
