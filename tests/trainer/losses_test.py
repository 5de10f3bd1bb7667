"""Losses and their gradients against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.trainer import losses

LN2 = float(np.log(2.0))
_CLIP = {"clip_low": 0.2, "clip_high": 0.3}
_OPTIONS = {
  "reinforce": {},
  "ppo_clip": _CLIP,
  "dual_clip": {**_CLIP, "clip_loss": 3.0},
  "gspo": _CLIP,
  "cispo": _CLIP,
  "aipo": {"weight_cap": 1.5},
  "vtrace": {"weight_cap": 1.5},
  "dppo_tv": {"divergence": 0.2, "weight_cap": 1.5},
}


def _tokens(logprobs, proximal, advantages, *, mask=None, ids=None):
  """One row; by default all of it is one sampled sequence."""
  row = lambda values: jnp.asarray(values, jnp.float32)[None]
  length = len(logprobs)
  return losses.Tokens(
    logprobs_BT=row(logprobs),
    proximal_logprobs_BT=row(proximal),
    advantages_BT=row(advantages),
    loss_mask_BT=row([1.0] * length if mask is None else mask),
    segment_ids_BT=jnp.asarray([[1] * length if ids is None else ids]),
  )


def _evaluate(name, tokens, **options):
  """Losses, the gradient of their sum by the log-probabilities, bounds."""
  function = losses.LOSSES[name].function
  options = options or _OPTIONS[name]

  def total(tokens):
    loss_BT, bounds = function(tokens, **options)
    return loss_BT.sum(), (loss_BT, bounds)

  gradient, (loss_BT, bounds) = jax.grad(total, has_aux=True, allow_int=True)(
    tokens
  )
  return loss_BT[0], gradient.logprobs_BT[0], bounds


# A token of prox 1/4 and log-probability log(1/4) + log r: loss and gradient.
@pytest.mark.parametrize(
  "name, log_ratio, advantage, loss, gradient",
  [
    # On policy: loss -A, and d(-rA) = -rA.
    ("ppo_clip", 0.0, 3.0, -3.0, -3.0),
    # r = 2 > 1.3: a gain is capped, a loss is not.
    ("ppo_clip", LN2, 1.0, -1.3, 0.0),
    ("ppo_clip", LN2, -1.0, 2.0, 2.0),
    # r = 1/2 < 0.8: a gain counts as it is, a loss is capped.
    ("ppo_clip", -LN2, 1.0, -0.5, -0.5),
    ("ppo_clip", -LN2, -1.0, 0.8, 0.0),
    ("ppo_clip", -LN2, 0.0, 0.0, 0.0),
    # As ppo_clip up to r = 3; beyond it a loss is 3 |A| and no more.
    ("dual_clip", LN2, 1.0, -1.3, 0.0),
    ("dual_clip", LN2, -1.0, 2.0, 2.0),
    ("dual_clip", -LN2, -1.0, 0.8, 0.0),
    ("dual_clip", 2 * LN2, -2.0, 6.0, 0.0),
    ("dual_clip", 2 * LN2, 2.0, -2.6, 0.0),
    # A sequence of one token: its ratio is the sequence's.
    ("gspo", LN2, 1.0, -1.3, 0.0),
    ("gspo", LN2, -1.0, 2.0, 2.0),
    # -w A log pi and -w A: log(1/2) = -LN2, log(1/8) = -3 LN2.
    ("reinforce", LN2, 2.0, 2.0 * LN2, -2.0),
    ("cispo", LN2, 2.0, 2.6 * LN2, -2.6),
    ("cispo", LN2, -2.0, -2.6 * LN2, 2.6),
    ("cispo", -LN2, 1.0, 2.4 * LN2, -0.8),
    ("cispo", 0.0, 1.0, 2.0 * LN2, -1.0),
    ("aipo", LN2, 2.0, 3.0 * LN2, -3.0),
    ("aipo", -LN2, 2.0, 3.0 * LN2, -1.0),
    ("vtrace", LN2, 2.0, 3.0 * LN2, -3.0),
    ("vtrace", -LN2, 2.0, 3.0 * LN2, -1.0),
    # 1/4 -> 1/2 moves by 0.25 > 0.2: no gain is left, but a loss counts.
    ("dppo_tv", LN2, 1.0, 0.0, 0.0),
    ("dppo_tv", LN2, -2.0, -3.0 * LN2, 3.0),
    # 1/4 -> 1/8 moves by 0.125 only, though r = 1/2.
    ("dppo_tv", -LN2, -1.0, -1.5 * LN2, 0.5),
  ],
)
def test_a_token_by_hand(name, log_ratio, advantage, loss, gradient):
  proximal = -2 * LN2
  tokens = _tokens([proximal + log_ratio], [proximal], [advantage])
  found = _evaluate(name, tokens)
  np.testing.assert_allclose(found[0], [loss], rtol=1e-6, atol=1e-7)
  np.testing.assert_allclose(found[1], [gradient], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
  "name, low, high",
  [
    ("ppo_clip", [2], [0]),
    # A ratio of 4 with A < 0 is beyond clip_loss.
    ("dual_clip", [2], [0, 4]),
    ("cispo", [2, 3], [0, 1, 4]),
    ("aipo", [], [0, 1, 4]),
    ("vtrace", [], [0, 1, 4]),
    # From 1/4 to 1/2, 1/2, 1/8, 1/8, 1: only gains are bounded.
    ("dppo_tv", [], [0]),
  ],
)
def test_bounds_name_the_tokens_that_are_held_back(name, low, high):
  logs = [LN2, LN2, -LN2, -LN2, 2 * LN2]
  advantages = [1.0, -1.0, -1.0, 1.0, -1.0]
  proximal = np.full(5, -2 * LN2)
  # Sequences of one token each, so that none speaks for another.
  tokens = _tokens(proximal + logs, proximal, advantages, ids=[1, 2, 3, 4, 5])
  bounds = _evaluate(name, tokens)[2]
  assert np.flatnonzero(bounds.is_low_BT[0]).tolist() == low
  assert np.flatnonzero(bounds.is_high_BT[0]).tolist() == high


def test_gspo_has_one_ratio_a_sequence():
  # Log-ratios 0.4 and -0.2 of the first sequence have mean 0.1; the second's
  # only one is 0.5. The token between them is not sampled.
  tokens = _tokens(
    [-1.0 + 0.4, -1.0 - 0.2, 0.0, -1.0 + 0.5],
    [-1.0, -1.0, 0.0, -1.0],
    [2.0, 2.0, 0.0, 1.0],
    mask=[1.0, 1.0, 0.0, 1.0],
    ids=[1, 1, 2, 2],
  )
  loss, gradient, bounds = _evaluate("gspo", tokens)
  ratio = np.exp(0.1)
  np.testing.assert_allclose(loss, [-2 * ratio, -2 * ratio, 0.0, -1.3], 1e-6)
  np.testing.assert_allclose(gradient, [-2 * ratio, -2 * ratio, 0, 0], 1e-6)
  assert bounds.is_high_BT[0].tolist() == [False, False, False, True]


def test_gspo_has_the_gradient_of_the_sequence_ratio():
  """The definition: s = (prod r)^(1 / n), differentiated as it stands."""
  logprobs, proximal = -np.array([[0.9, 2.0, 1.1], [1.0, 1.9, 1.3]])

  def ratio(logprobs):
    return jnp.exp(jnp.mean(logprobs - jnp.asarray(proximal, jnp.float32)))

  expected = -1.7 * jax.grad(ratio)(jnp.asarray(logprobs, jnp.float32))
  gradient = _evaluate("gspo", _tokens(logprobs, proximal, [1.7] * 3))[1]
  # A mean over the sequence's tokens divides the sum by their number.
  np.testing.assert_allclose(gradient / 3, expected, rtol=1e-5)


def test_vtrace_weighs_by_what_is_still_to_come():
  # r = 2, 1/2, 4, 1/4, 2 with a cap of 1.5, the third not sampled: it counts
  # for nothing. From the last: rho = 1.5; 1/4 * 1.5; 1/2 * 1/4 * 1.5; and
  # 1.5 * 1/2 * 1/4 * 1.5.
  logs = LN2 * np.array([1.0, -1.0, 0.0, -2.0, 1.0])
  mask = np.array([1.0, 1.0, 0.0, 1.0, 1.0])
  proximal = -3.0 * mask
  tokens = _tokens(proximal + logs, proximal, 2.0 * mask, mask=mask)
  gradient = _evaluate("vtrace", tokens)[1]
  weights = [0.28125, 0.1875, 0.0, 0.375, 1.5]
  np.testing.assert_allclose(gradient, -2.0 * np.array(weights), rtol=1e-5)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_log_ratios_without_measure_stay_finite(name):
  # Each in a sequence of its own, with advantages of all signs.
  logprobs = [0.0, -1e4, 0.0, -1e4, 0.0, -1e4]
  proximal = [-1e4, 0.0, -1e4, 0.0, -1e4, 0.0]
  advantages = [1.0, 1.0, -1.0, -1.0, 0.0, 0.0]
  tokens = _tokens(logprobs, proximal, advantages, ids=[1, 2, 3, 4, 5, 6])
  loss, gradient, _ = _evaluate(name, tokens)
  assert jnp.isfinite(loss).all() and jnp.isfinite(gradient).all()
  assert not loss[4:].any() and not gradient[4:].any()


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip"])
def test_gradient_equals_the_numeric_one(name):
  rng = np.random.default_rng(0)
  logprobs, proximal = -rng.uniform(0.5, 3.0, (2, 9))
  tokens = _tokens(logprobs, proximal, rng.normal(size=9))
  function = losses.LOSSES[name].function

  @jax.jit
  def total(logprobs_BT):
    moved = tokens._replace(logprobs_BT=logprobs_BT)
    return function(moved, **_OPTIONS[name])[0].sum()

  found = _evaluate(name, tokens)[1]
  step = 1e-3
  for index in range(9):
    move_BT = jnp.zeros((1, 9)).at[0, index].set(step)
    slope = (
      total(tokens.logprobs_BT + move_BT) - total(tokens.logprobs_BT - move_BT)
    ) / (2 * step)
    np.testing.assert_allclose(found[index], slope, atol=2e-2)


def test_supervised_is_the_negative_log_likelihood():
  loss_BT = losses.supervised(jnp.array([[-1.5, -0.25]]))
  assert loss_BT.tolist() == [[1.5, 0.25]]
