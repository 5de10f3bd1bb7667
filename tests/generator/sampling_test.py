import dataclasses
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dora_jax import types
from dora_jax.generator import sampling
from tests.generator import tiny

_LOGITS_V = np.array([0.3, -1.0, 2.0, 0.0, 1.1], np.float32)
_sample = jax.jit(sampling.sample)


def _sample_many(num_draws, *, logits_V=_LOGITS_V, **settings):
  logits_BV = jnp.broadcast_to(logits_V, (num_draws, len(logits_V)))
  keys_B = jax.random.split(jax.random.key(0), num_draws)
  rules = tiny.make_rules([types.Sampling(**settings)] * num_draws)
  return _sample(logits_BV, keys_B, rules, np.ones(num_draws, bool))


def _keep_slowly(logits_V, settings: types.Sampling):
  """Probabilities before truncation, who is kept, and how near that came.

  By sorting, in float64. The last is the least distance of anything compared to
  what it was compared with.
  """
  scaled_V = logits_V.astype(np.float64) / (settings.temperature or 1.0)
  probs_V = np.exp(scaled_V - scaled_V.max())
  probs_V /= probs_V.sum()
  descending = np.sort(probs_V)[::-1]
  least, nearest = settings.min_p * descending[0], 1.0
  if settings.top_k:
    least = max(least, descending[: settings.top_k][-1])
  if settings.top_p < 1:
    left = descending
    if settings.top_k:
      left = descending[descending >= descending[: settings.top_k][-1]]
    shares = np.cumsum(left) / left.sum()
    nearest = np.abs(shares - settings.top_p).min()
    least = max(least, left[np.argmax(shares >= settings.top_p)])
  if 0 < settings.min_p < 1:
    ratios = probs_V / descending[0]
    nearest = min(nearest, np.abs(ratios - settings.min_p).min())
  return probs_V, probs_V >= least, nearest


_TRUNCATIONS = [
  {"temperature": 0.6},
  {},
  {"temperature": 1.5},
  {"top_k": 3},
  {"top_p": 0.8},
  {"min_p": 0.2, "temperature": 1.5},
  {"top_k": 4, "top_p": 0.9, "min_p": 0.1, "temperature": 2.0},
]


@pytest.mark.parametrize("settings", _TRUNCATIONS, ids=str)
def test_draws_follow_the_distribution_that_the_logprobs_are_of(settings):
  drawn = _sample_many(20_000, **settings)
  probs_V, is_kept_V, _ = _keep_slowly(_LOGITS_V, types.Sampling(**settings))
  kept_mass = probs_V[is_kept_V].sum()
  probs_V = np.where(is_kept_V, probs_V, 0.0) / kept_mass
  shares_V = np.bincount(drawn.token_B, minlength=len(_LOGITS_V)) / 20_000
  # Four deviations of a binomial share with 20,000 draws are at most 0.0142.
  np.testing.assert_allclose(shares_V, probs_V, atol=0.0142)
  assert not shares_V[~is_kept_V].any()
  logprobs_B = np.log(probs_V[np.asarray(drawn.token_B)])
  np.testing.assert_allclose(drawn.logprob_B, logprobs_B, atol=1e-6)
  np.testing.assert_allclose(drawn.kept_mass_B, kept_mass, atol=1e-6)


def test_truncation_by_hand():
  # Probabilities 8, 4, 2, 2 of 16.
  logits_V = np.log(np.array([2, 8, 2, 4], np.float32))
  for settings, kept in [
    ({"top_k": 1}, 8),
    ({"top_k": 2}, 12),
    # The two last ones are alike, so both stay.
    ({"top_k": 3}, 16),
    ({"top_k": 9}, 16),
    ({"top_p": 0.49}, 8),
    ({"top_p": 0.51}, 12),
    ({"top_p": 0.76}, 16),
    # 8 of the 12 that top-k leaves.
    ({"top_k": 2, "top_p": 0.66}, 8),
    ({"min_p": 0.51}, 8),
    ({"min_p": 0.49}, 12),
    ({"min_p": 1.0}, 8),
    # Ratios become square roots: 2 of 1 + 1 + 1.414 + 2.
    ({"temperature": 2.0, "min_p": 0.8}, 16 * 2 / (4 + 2**0.5)),
  ]:
    drawn = _sample_many(50, logits_V=logits_V, **settings)
    np.testing.assert_allclose(drawn.kept_mass_B, kept / 16, rtol=1e-6)
    if kept == 8:
      assert set(drawn.token_B.tolist()) == {1}
      np.testing.assert_allclose(drawn.logprob_B, 0.0, atol=1e-6)


def _invert_slowly(weights_V, uniform_2):
  """The token at two uniform numbers, as `sample` describes it."""
  width = sampling._block_width(len(weights_V))
  fill = -len(weights_V) % width
  weights_NC = np.pad(weights_V, (0, fill)).reshape(-1, width)
  index = 0
  for weights_N in (weights_NC.sum(axis=1), None):
    weights_N = weights_NC[index] if weights_N is None else weights_N
    shares_N = np.cumsum(weights_N) / weights_N.sum()
    uniform, *uniform_2 = uniform_2
    hypothesis.assume(np.abs(shares_N[:-1] - uniform).min(initial=1) > 1e-5)
    previous, index = index, int(np.argmax(shares_N > uniform))
  return previous * width + index


@pytest.mark.parametrize(
  ("num_tokens", "width"),
  [
    # The next power of 2 from the square root on.
    (1, 1),
    (14, 4),
    (65, 16),
    (50_257, 256),
    # At most so many that 8 devices can share the blocks.
    (512, 32),
    (32_000, 32),
    (151_936, 16),
    (262_144, 512),
  ],
)
def test_blocks_can_be_shared_by_devices(num_tokens, width):
  assert sampling._block_width(num_tokens) == width


def test_what_has_no_weight_is_never_picked():
  rng = np.random.default_rng(0)
  weights_BN = rng.uniform(size=(2_000, 1_000)).astype(np.float32)
  weights_BN[rng.uniform(size=weights_BN.shape) < 0.5] = 0.0
  weights_BN[::2, 700:] = 0.0
  # Sums of so many are rounded in an order of their own: here and there they
  # rise where there is no weight, and there we aim.
  sum_BN = np.array(jax.jit(lambda x_BN: jnp.cumsum(x_BN, axis=1))(weights_BN))
  rises_BN = (np.diff(sum_BN) > 0) & (weights_BN[:, 1:] == 0)
  assert rises_BN.any(axis=1).mean() > 0.5
  before_B = np.take_along_axis(sum_BN, rises_BN.argmax(axis=1)[:, None], 1)
  for uniform_B in (
    np.zeros(2_000, np.float32),
    before_B[:, 0] / sum_BN[:, -1],
    np.full(2_000, np.nextafter(np.float32(1), np.float32(0))),
  ):
    index_B, total_B = jax.jit(sampling._pick)(weights_BN, uniform_B)
    picked_B = np.take_along_axis(weights_BN, np.array(index_B)[:, None], 1)
    assert (picked_B > 0).all()
    np.testing.assert_allclose(total_B, weights_BN.sum(axis=1), rtol=1e-6)


_SETTINGS = st.builds(
  types.Sampling,
  temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
  top_k=st.sampled_from([0, 1, 3, 30, 100]),
  top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
  min_p=st.sampled_from([0.0, 0.1, 1.0]),
)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
  num_tokens=st.sampled_from([1, 7, 65]),
  rows=st.lists(_SETTINGS, min_size=3, max_size=3),
  seed=st.integers(0, 2**31 - 1),
  is_coarse=st.booleans(),
)
def test_equals_a_slow_sampler_that_sorts(num_tokens, rows, seed, is_coarse):
  rng = np.random.default_rng(seed)
  logits_BV = rng.normal(0, 3, (3, num_tokens)).astype(np.float32)
  if is_coarse:
    # Many alike, and some impossible.
    logits_BV = np.round(logits_BV)
    logits_BV[logits_BV < -4] = -np.inf
    hypothesis.assume(np.isfinite(logits_BV).any(axis=1).all())
  keys_B = jax.random.split(jax.random.key(seed), 3)
  drawn = _sample(logits_BV, keys_B, tiny.make_rules(rows), np.ones(3, bool))
  for row, settings in enumerate(rows):
    token = int(drawn.token_B[row])
    expected = int(logits_BV[row].argmax())
    if settings.temperature == 0:
      settings = types.Sampling(temperature=0.0)
    probs_V, is_kept_V, nearest = _keep_slowly(logits_BV[row], settings)
    hypothesis.assume(nearest > 1e-5)
    kept_mass = probs_V[is_kept_V].sum()
    if settings.temperature:
      expected = _invert_slowly(
        np.where(is_kept_V, probs_V, 0.0),
        jax.random.uniform(keys_B[row], (2,)).tolist(),
      )
    assert token == expected
    logprob = np.log(probs_V[token] / kept_mass)
    np.testing.assert_allclose(drawn.logprob_B[row], logprob, atol=2e-5)
    np.testing.assert_allclose(drawn.kept_mass_B[row], kept_mass, rtol=1e-5)


def test_settings_of_others_change_not_a_bit():
  rng = np.random.default_rng(0)
  rows = [
    types.Sampling(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product(
      (0.0, 0.7, 1.0), (0, 5), (1.0, 0.8), (0.0, 0.1)
    )
  ]
  num_rows = len(rows)
  logits_BV = rng.normal(0, 3, (num_rows, 70)).astype(np.float32)
  keys_B = jax.random.split(jax.random.key(0), num_rows)
  rules = tiny.make_rules(rows)
  together = _sample(logits_BV, keys_B, rules, np.ones(num_rows, bool))
  for row in range(num_rows):
    is_live_B = np.arange(num_rows) == row
    others_BV = np.where(is_live_B[:, None], logits_BV, np.nan)
    alone = _sample(others_BV, keys_B, rules, is_live_B)
    for field in dataclasses.fields(sampling.Drawn):
      ours = getattr(together, field.name)[row]
      assert ours == getattr(alone, field.name)[row], (field.name, rows[row])
    plain = rows[row] == types.Sampling(temperature=rows[row].temperature)
    assert (together.kept_mass_B[row] == 1.0) == (
      plain or not rows[row].temperature
    )


def test_nothing_is_sorted():
  arguments = (
    jax.ShapeDtypeStruct((4, 40), jnp.float32),
    jax.random.split(jax.random.key(0), 4),
    tiny.make_rules([types.Sampling()] * 4),
    np.ones(4, bool),
  )
  text = _sample.lower(*arguments).as_text()
  assert "stablehlo.while" in text
  assert "stablehlo.sort" not in text and "top_k" not in text


def test_temperature_zero_takes_the_likeliest_at_its_untempered_logprob():
  drawn = _sample_many(3, temperature=0.0, top_k=1, top_p=0.5, min_p=0.5)
  expected = 2.0 - np.log(np.exp(_LOGITS_V).sum())
  assert drawn.token_B.tolist() == [2, 2, 2]
  np.testing.assert_allclose(drawn.logprob_B, expected, atol=1e-6)
  assert drawn.kept_mass_B.tolist() == [1.0, 1.0, 1.0]


def test_a_logprob_is_never_above_zero():
  logits_BV = jnp.array([[1e4, 0.0, -1e4], [-3e4, -3e4, -1e4]], jnp.float32)
  keys_B = jax.random.split(jax.random.key(0), 2)
  rules = tiny.make_rules([types.Sampling(), types.Sampling(temperature=0.01)])
  drawn = _sample(logits_BV, keys_B, rules, np.ones(2, bool))
  assert drawn.logprob_B.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_logits_that_are_not_finite_yield_nan(settings):
  for bad in (np.nan, np.inf):
    logits_V = np.array([0.0, bad, 1.0], np.float32)
    drawn = _sample_many(2, logits_V=logits_V, **settings)
    assert np.isnan(drawn.logprob_B).all()


def test_logits_of_less_than_fp32_are_refused():
  with pytest.raises(TypeError, match="bfloat16"):
    sampling.sample(
      jnp.zeros((1, 3), jnp.bfloat16),
      jax.random.split(jax.random.key(0), 1),
      tiny.make_rules([types.Sampling()]),
      jnp.ones(1, bool),
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
