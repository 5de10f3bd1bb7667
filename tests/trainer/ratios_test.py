"""Proximal policies and corrections against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.trainer import ratios

LN2 = float(np.log(2.0))


def _row(values):
  return jnp.asarray(values, jnp.float32)[None]


@pytest.mark.parametrize(
  "kind, expected",
  [
    ("behavior", [-4.0, -4.0, -4.0]),
    ("recomputed", [-3.0, -3.0, -3.0]),
    ("current", [-1.0, -1.0, -1.0]),
    # Lag 0: the current one; lag 1: the behavior one; lag 3: a third of it.
    ("loglinear", [-1.0, -4.0, -2.0]),
  ],
)
def test_proximal_policies_by_hand(kind, expected):
  behavior_BT, recomputed_BT = _row([-4.0] * 3), _row([-3.0] * 3)
  lags_BT = jnp.array([[0, 1, 3]])

  def proximal(logprobs_BT):
    return ratios.proximal(
      kind, logprobs_BT, behavior_BT, recomputed_BT, lags_BT
    )

  logprobs_BT = _row([-1.0] * 3)
  np.testing.assert_allclose(proximal(logprobs_BT)[0], expected, rtol=1e-6)
  # It is a constant: nothing flows back into the params.
  assert not jax.grad(lambda x: proximal(x).sum())(logprobs_BT).any()


# Two sequences, of log-weights (LN2, -2 LN2) and (LN2, not sampled, LN2).
_GAPS = ratios.Gaps(
  log_weights_BT=_row([LN2, -2 * LN2, LN2, 0.0, LN2]),
  loss_mask_BT=_row([1.0, 1.0, 1.0, 0.0, 1.0]),
  segment_ids_BT=jnp.array([[1, 1, 2, 2, 2]]),
)


_CORRECTED = [
  ("none", {}, [1, 1, 1, 1, 1], [], []),
  ("tis", {"weight_cap": 1.5}, [1.5, 0.25, 1.5, 1, 1.5], [0, 2, 4], []),
  (
    "icepop",
    {"weight_floor": 0.5, "weight_cap": 2.5},
    [2, 0, 2, 1, 2],
    [],
    [1],
  ),
  # Products 1/2 and 4.
  (
    "sequence_mask",
    {"sequence_floor": 0.4, "sequence_cap": 3.0},
    [1, 1, 0, 0, 0],
    [],
    [2, 3, 4],
  ),
  # Geometric means 2^(-1/2) and 2.
  (
    "geometric_mask",
    {"sequence_floor": 0.8, "sequence_cap": 2.5},
    [0, 0, 1, 1, 1],
    [],
    [0, 1],
  ),
  (
    "hispo",
    {
      "sequence_floor": 0.6,
      "sequence_cap": 1.9,
      "weight_floor": 0.5,
      "weight_cap": 3.0,
    },
    [1, 0, 0, 0, 0],
    [],
    [1, 2, 3, 4],
  ),
]


@pytest.mark.parametrize("kind, options, weights, capped, masked", _CORRECTED)
def test_corrections_by_hand(kind, options, weights, capped, masked):
  found = ratios.CORRECTIONS[kind](_GAPS, **options)
  np.testing.assert_allclose(found.weights_BT[0], weights, rtol=1e-6)
  assert np.flatnonzero(found.is_capped_BT[0]).tolist() == capped
  assert np.flatnonzero(found.is_masked_BT[0]).tolist() == masked


def test_every_correction_has_its_numbers():
  assert {case[0] for case in _CORRECTED} == set(ratios.CORRECTIONS)


def test_a_long_sequence_of_large_ratios_is_masked_and_finite():
  gaps = ratios.Gaps(
    log_weights_BT=jnp.full((1, 64), 20.0),
    loss_mask_BT=jnp.ones((1, 64)),
    segment_ids_BT=jnp.ones((1, 64), jnp.int32),
  )
  found = ratios.sequence_mask(gaps, sequence_floor=0.5, sequence_cap=2.0)
  assert found.is_masked_BT.all() and not found.weights_BT.any()
