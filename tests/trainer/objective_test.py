"""Objectives whole: what they add up, and what they do with stale samples."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.trainer import losses, ratios, regularizers
from dora_jax.trainer import objective as objective_lib
from tests.trainer import tiny

LN2 = float(np.log(2.0))


def _changed(**fields):
  return dataclasses.replace(tiny.OBJECTIVE, **fields)


def _sampled(**changes):
  """One row of a sequence of two sampled tokens and one of a single one."""
  row = lambda values: jnp.asarray(np.array([values], np.float32))
  sampled = objective_lib.Sampled(
    behavior_logprobs_BT=row([-2.0, -2.0, 0.0, -2.0]),
    advantages_BT=row([1.0, 1.0, 0.0, -3.0]),
    loss_mask_BT=row([1.0, 1.0, 0.0, 1.0]),
    segment_ids_BT=jnp.asarray(np.array([[1, 1, 2, 2]])),
    lags_BT=jnp.asarray(np.array([[1, 1, 0, 1]])),
  )
  return sampled._replace(
    **{name: row(values) for name, values in changes.items()}
  )


def _total(sampled, objective, *, logprobs=(-2.0, -2.0, 0.0, -2.0)):
  # Jitted: one compilation in place of one for each operation.
  return jax.jit(objective_lib.weighted_sum, static_argnums=3)(
    np.array([logprobs], np.float32),
    np.full((1, 4), 0.5, np.float32),
    sampled,
    objective,
  )


@pytest.mark.parametrize(
  "aggregation, total",
  # On policy the losses are -1, -1, 3; by sequence their means -1 and 3.
  [("token_mean", 1.0), ("constant", 1.0), ("sequence_mean", 2.0)],
)
def test_aggregation_weighs_tokens(aggregation, total):
  found, _ = _total(_sampled(), _changed(aggregation=aggregation))
  np.testing.assert_allclose(found, total, rtol=1e-6)


def test_the_parts_add_up():
  # Around the current policy, twice as likely as the behavior policy: losses
  # -1, -1, 3 weigh 2 each. k1 to the reference is LN2 and weighs 2 as well.
  objective = _changed(
    proximal="current",
    correction="tis",
    weight_cap=4.0,
    kl="k1",
    kl_coefficient=0.1,
    entropy_coefficient=0.01,
  )
  sampled = _sampled(
    behavior_logprobs_BT=[-2.0 - LN2, -2.0 - LN2, 0.0, -2.0 - LN2],
    ref_logprobs_BT=[-2.0 - LN2, -2.0 - LN2, 0.0, -2.0 - LN2],
  )
  found, seen = _total(sampled, objective)
  expected = 2.0 + 3 * (0.1 * 2 * LN2 - 0.01 * 0.5)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  np.testing.assert_allclose(seen.kl_BT[0, 0], 2 * LN2, rtol=1e-5)
  np.testing.assert_allclose(seen.log_ratios_BT[0, 0], LN2, rtol=1e-5)


def test_longcat_weighs_the_clip_by_the_gap_of_the_engines():
  # The engine recorded 1/2 of what the trainer recomputes: w = 2, cut to 1.5.
  # Against the recomputed policy r = 2: a gain ends at 1.28, a loss counts 2.
  objective = _changed(
    loss="dual_clip", proximal="recomputed", correction="tis", weight_cap=1.5
  )
  recomputed = [-2.0 - LN2, -2.0 - LN2, 0.0, -2.0 - LN2]
  sampled = _sampled(
    recomputed_logprobs_BT=recomputed,
    behavior_logprobs_BT=[x - LN2 if x else x for x in recomputed],
  )
  found, seen = _total(sampled, objective)
  np.testing.assert_allclose(found, 1.5 * (2 * -1.28 + 2 * 3.0), rtol=1e-5)
  assert seen.is_capped_BT[0].tolist() == [True, True, False, True]


def test_hispo_masks_by_the_engines_and_clips_the_whole_ratio():
  # Recomputed / recorded is 1.1 and 1.5, of geometric mean 1.28, and 1.1: the
  # second token alone is masked. Against what was recorded r is 1.4, of which a
  # gain ends at 1.28 (against the recomputed it would be 1.27), and 2.
  objective = _changed(
    loss="dual_clip",
    proximal="recomputed",
    correction="hispo",
    weight_floor=0.8,
    weight_cap=1.2,
    sequence_floor=0.7,
    sequence_cap=1.3,
  )
  behavior = -2.0 - np.log([1.4, 1.4, 1.0, 2.0])
  sampled = _sampled(
    behavior_logprobs_BT=behavior * [1, 1, 0, 1],
    recomputed_logprobs_BT=(behavior + np.log([1.1, 1.5, 1.0, 1.1]))
    * [1, 1, 0, 1],
  )
  found, seen = _total(sampled, objective)
  np.testing.assert_allclose(found, -1.28 + 2 * 3.0, rtol=1e-5)
  assert seen.is_masked_BT[0].tolist() == [False, True, False, False]
  assert seen.is_clipped_high_BT[0, 0]
  # A closer bound on the mean leaves the first sequence out.
  closer = dataclasses.replace(objective, sequence_cap=1.2)
  found, seen = _total(sampled, closer)
  np.testing.assert_allclose(found, 2 * 3.0, rtol=1e-5)
  assert seen.is_masked_BT[0, :2].all()


def test_masked_positions_have_no_influence():
  objective = _changed(
    loss="gspo", proximal="current", correction="hispo", kl="k3"
  )

  @jax.jit
  @jax.grad
  def gradient_of(logprobs_BT, sampled):
    entropies_BT = jnp.full((1, 4), 0.5)
    return objective_lib.weighted_sum(
      logprobs_BT, entropies_BT, sampled, objective
    )[0]

  def gradient(sampled, logprobs):
    return gradient_of(np.array([logprobs], np.float32), sampled)

  sampled = _sampled(ref_logprobs_BT=[-2.5, -2.5, 0.0, -2.5])
  expected = gradient(sampled, [-2.0, -2.1, 0.0, -2.0])
  found = gradient(sampled, [-2.0, -2.1, np.nan, -2.0])
  np.testing.assert_array_equal(found, expected)
  assert expected[0, [0, 1, 3]].all() and expected[0, 2] == 0.0


@pytest.mark.parametrize(
  "correction, kl",
  list(
    itertools.zip_longest(
      ratios.CORRECTIONS, regularizers.ESTIMATES, fillvalue="k3"
    )
  ),
)
def test_log_ratios_without_measure_stay_finite(correction, kl):
  # Of policy, behavior policy and reference, each against each.
  sampled = _sampled(
    behavior_logprobs_BT=[-1e4, 0.0, 0.0, -1.0],
    recomputed_logprobs_BT=[0.0, -1e4, 0.0, -1e4],
    ref_logprobs_BT=[-1e4, -1e4, 0.0, 0.0],
  )
  objective = _changed(proximal="recomputed", correction=correction, kl=kl)

  @jax.jit
  @jax.value_and_grad
  def total(logprobs_BT):
    entropies_BT = jnp.zeros((1, 4))
    return objective_lib.weighted_sum(
      logprobs_BT, entropies_BT, sampled, objective
    )[0]

  found, gradient_BT = total(np.array([[0.0, -1e4, 0.0, -1e4]], np.float32))
  assert jnp.isfinite(found) and jnp.isfinite(gradient_BT).all()


# The tiny bandit. A trajectory is two draws of a number, each from a discrete
# bell around a param of its own, and earns minus the squared distances to two
# targets. So the optimum lies inside, and feedback that comes late overshoots:
# samples of three versions ago push where the policy has gone meanwhile.
_TARGETS = jnp.array([1.0, -0.5])
_START = -1.0
_NUMBERS = jnp.linspace(-3.0, 3.0, 25)
_NUM_ROWS = 64
_NUM_STEPS = 100
_LR = 0.6


def _draw_logprobs(means_T):
  squares_TV = jnp.square(_NUMBERS[None, :] - means_T[:, None])
  return jax.nn.log_softmax(-2.0 * squares_TV)


def _error(objective, *, lag: int) -> float:
  """Mean distance of the worse param from its target over the last 30 steps."""
  shape = (_NUM_ROWS, 2)

  def step(past, uniforms_BT):
    behavior_TV = _draw_logprobs(past[-1])
    reached_TV = jnp.cumsum(jnp.exp(behavior_TV), axis=1)
    is_passed_BTV = reached_TV[None, :, :-1] < uniforms_BT[:, :, None]
    draws_BT = is_passed_BTV.sum(axis=2)
    take = lambda logs_TV: logs_TV[jnp.arange(2)[None, :], draws_BT]
    rewards_B = -jnp.square(_NUMBERS[draws_BT] - _TARGETS[None, :]).sum(axis=1)
    advantages_B = rewards_B - rewards_B.mean()
    sampled = objective_lib.Sampled(
      behavior_logprobs_BT=take(behavior_TV),
      advantages_BT=jnp.broadcast_to(advantages_B[:, None], shape),
      loss_mask_BT=jnp.ones(shape),
      segment_ids_BT=jnp.ones(shape, jnp.int32),
      lags_BT=jnp.full(shape, lag, jnp.int32),
      recomputed_logprobs_BT=take(behavior_TV),
    )

    def loss(means_T):
      total, _ = objective_lib.weighted_sum(
        take(_draw_logprobs(means_T)), jnp.zeros(shape), sampled, objective
      )
      return total / draws_BT.size

    new_T = past[0] - _LR * jax.grad(loss)(past[0])
    past = jnp.concatenate([new_T[None, :], past[:-1]])
    return past, jnp.abs(new_T - _TARGETS).max()

  # Not JAX's own draws: to compile them would take most of the test's time.
  rng = np.random.default_rng(0)
  uniforms = rng.uniform(size=(_NUM_STEPS, *shape)).astype(np.float32)
  start = jnp.full((lag + 1, 2), _START)
  _, errors = jax.jit(lambda xs: jax.lax.scan(step, start, xs))(uniforms)
  return float(errors[-30:].mean())


_CURRENT = {"proximal": "current"}
_BY_SEQUENCE = {"sequence_floor": 0.7, "sequence_cap": 1.4}
_STALE_PROOF = {
  "ppo_clip": {},
  "dual_clip": {"loss": "dual_clip"},
  "gspo": {"loss": "gspo"},
  # As in the paper, with no lower bound: from 0.8 to 1.28 a weight hardly tells
  # stale samples apart, and the policy overshoots.
  "cispo": {"loss": "cispo", "clip_low": 1.0},
  "aipo": {"loss": "aipo"},
  "vtrace": {"loss": "vtrace"},
  "dppo_tv": {"loss": "dppo_tv", "divergence": 0.05},
  "longcat": {
    "loss": "dual_clip",
    "proximal": "recomputed",
    "correction": "tis",
  },
  "decoupled_ppo": {**_CURRENT, "correction": "tis"},
  "loglinear": {"proximal": "loglinear", "correction": "tis"},
  "icepop": {**_CURRENT, "correction": "icepop"},
  "sequence_mask": {
    **_CURRENT,
    "correction": "sequence_mask",
    "sequence_floor": 0.5,
    "sequence_cap": 2.0,
  },
  "geometric_mask": {
    **_CURRENT,
    "correction": "geometric_mask",
    **_BY_SEQUENCE,
  },
  "hispo": {**_CURRENT, "correction": "hispo", **_BY_SEQUENCE},
}


@pytest.mark.parametrize("name", _STALE_PROOF)
def test_objectives_reach_the_optimum_by_stale_samples(name):
  objective = _changed(**_STALE_PROOF[name])
  assert objective.is_stale_proof
  assert _error(objective, lag=3) < 0.2


def test_every_stale_proof_choice_is_among_them():
  tried = [_changed(**changes) for changes in _STALE_PROOF.values()]
  bounded = {name for name, loss in losses.LOSSES.items() if loss.is_bounded}
  assert {objective.loss for objective in tried} == bounded
  corrections = {objective.correction for objective in tried}
  assert corrections == {*ratios.CORRECTIONS}
  assert {objective.proximal for objective in tried} == {*ratios.PROXIMAL}


def test_without_a_trust_region_stale_samples_miss_the_optimum():
  plain = _changed(loss="reinforce")
  assert not plain.is_stale_proof
  assert _error(plain, lag=0) < 0.2
  assert _error(plain, lag=3) > 0.8
