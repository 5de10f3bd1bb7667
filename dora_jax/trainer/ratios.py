"""Ratios of policies, the proximal policy, and corrections for who sampled.

Four policies assign log-probabilities to a sampled token, all in nats:

  pi      the params being trained
  prox    the proximal policy, to which a loss compares pi; see `proximal`
  behav   the behavior policy, as the generator recorded it at sampling time
  ref     a frozen reference; see regularizers.py

A correction weights each token by w = prox / behav, a constant. What that gap
means depends on prox: between two engines with the same params where prox is
recomputed, and staleness as well where it is the current policy. Sums and
products over a sequence leave out what the policy did not sample: there all
log-ratios must be 0.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from dora_jax.trainer import segments

# exp(20) is 5e8: far beyond any clip, far below what overflows float32.
MAX_LOG_RATIO = 20.0

PROXIMAL = ("behavior", "recomputed", "current", "loglinear")


def log_ratios(
  logprobs_BT: Float[jax.Array, "B T"], old_logprobs_BT: Float[jax.Array, "B T"]
) -> Float[jax.Array, "B T"]:
  """log(new / old), clamped to +-20; no gradient flows where that binds."""
  return jnp.clip(logprobs_BT - old_logprobs_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def proximal(
  kind: str,
  logprobs_BT: Float[jax.Array, "B T"],
  behavior_logprobs_BT: Float[jax.Array, "B T"],
  recomputed_logprobs_BT: Float[jax.Array, "B T"] | None,
  lags_BT: Int[jax.Array, "B T"],
) -> Float[jax.Array, "B T"]:
  """Log-probabilities of the proximal policy, a constant.

  behavior    those recorded at sampling time
  recomputed  of the version that sampled, by the training forward
  current     of the params from which the update starts
  loglinear   log prox = a log behav + (1 - a) log pi, a = 1 / lag; at lag 0 it
              is the current one

  A step is one update, taken where it starts. So "current" makes the ratio
  pi / prox exactly 1, and a clip of it would bind only if a step made several
  updates; all staleness is then in the weights.
  Sources: AReaL, section 5.2 (https://arxiv.org/abs/2505.24298) for "current";
  A-3PO (https://arxiv.org/abs/2512.06547) for "loglinear"; the
  LongCat report (https://arxiv.org/abs/2509.18883) for "recomputed".
  """
  current_BT = jax.lax.stop_gradient(logprobs_BT)
  match kind:
    case "behavior":
      return behavior_logprobs_BT
    case "recomputed":
      assert recomputed_logprobs_BT is not None
      return recomputed_logprobs_BT
    case "current":
      return current_BT
    case "loglinear":
      is_fresh_BT = lags_BT == 0
      shares_BT = 1.0 / jnp.maximum(lags_BT, 1).astype(logprobs_BT.dtype)
      mixed_BT = current_BT + shares_BT * (behavior_logprobs_BT - current_BT)
      return jnp.where(is_fresh_BT, current_BT, mixed_BT)
    case unknown:
      raise ValueError(f"Unknown proximal policy {unknown!r}, need {PROXIMAL}.")


class Weights(NamedTuple):
  """What a correction makes of each token; carries no gradient.

  Attributes:
    weights_BT: factor of the token's loss.
    is_capped_BT: its weight was cut.
    is_masked_BT: it is left out of the loss, though not of the denominator.
  """

  weights_BT: Float[jax.Array, "B T"]
  is_capped_BT: Bool[jax.Array, "B T"]
  is_masked_BT: Bool[jax.Array, "B T"]


class Gaps(NamedTuple):
  """What a correction sees of each token.

  Attributes:
    log_weights_BT: of w = prox / behav, clamped; 0 where not sampled.
    loss_mask_BT: 1.0 where sampled.
    segment_ids_BT: which sequence of its row it belongs to.
  """

  log_weights_BT: Float[jax.Array, "B T"]
  loss_mask_BT: Float[jax.Array, "B T"]
  segment_ids_BT: Int[jax.Array, "B T"]


def no_correction(gaps: Gaps) -> Weights:
  """Weights every token by 1."""
  return _masked(jnp.zeros(gaps.log_weights_BT.shape, bool))


def truncated(gaps: Gaps, *, weight_cap: float) -> Weights:
  """Truncated importance sampling (TIS): min(w, weight_cap).

  Around the current policy it is the weight of decoupled PPO, whose authors do
  not cap it: the cap bounds the variance at the price of a bias.
  Sources: IMPALA, section 4.1 (https://arxiv.org/abs/1802.01561); Hilton et
  al., section 3 (https://arxiv.org/abs/2110.00641).
  """
  weights_BT = jnp.exp(gaps.log_weights_BT)
  return Weights(
    weights_BT=jnp.minimum(weights_BT, weight_cap),
    is_capped_BT=weights_BT > weight_cap,
    is_masked_BT=jnp.zeros(weights_BT.shape, bool),
  )


def icepop(gaps: Gaps, *, weight_floor: float, weight_cap: float) -> Weights:
  """w where weight_floor <= w <= weight_cap, else 0.

  Source: Ring-1T, section on IcePop (https://arxiv.org/abs/2510.18855).
  """
  weights_BT = jnp.exp(gaps.log_weights_BT)
  is_masked_BT = (weights_BT < weight_floor) | (weights_BT > weight_cap)
  return Weights(
    weights_BT=jnp.where(is_masked_BT, 0.0, weights_BT),
    is_capped_BT=jnp.zeros(weights_BT.shape, bool),
    is_masked_BT=is_masked_BT,
  )


def sequence_mask(
  gaps: Gaps, *, sequence_floor: float, sequence_cap: float
) -> Weights:
  """1 where sequence_floor <= prod_t w <= sequence_cap, else 0.

  The product runs over the sequence, which is kept or rejected as a whole.
  Source: rejection by the sequence's ratio as in "When Speed Kills Stability"
  (Liu et al., 2025); LongCat-Flash-Prover (https://arxiv.org/abs/2603.21065).
  """
  logs_BT = segments.sums(gaps.log_weights_BT, gaps.segment_ids_BT)
  return _masked(_outside(logs_BT, sequence_floor, sequence_cap))


def geometric_mask(
  gaps: Gaps, *, sequence_floor: float, sequence_cap: float
) -> Weights:
  """1 where sequence_floor <= exp(mean_t log w) <= sequence_cap, else 0.

  Unlike the product, the mean does not grow with the length.
  Source: as for `sequence_mask`.
  """
  logs_BT = segments.means(*gaps)
  return _masked(_outside(logs_BT, sequence_floor, sequence_cap))


def hispo(
  gaps: Gaps,
  *,
  weight_floor: float,
  weight_cap: float,
  sequence_floor: float,
  sequence_cap: float,
) -> Weights:
  """1 where both the sequence's geometric mean and w are within bounds.

  sequence_floor <= exp(mean_t log w) <= sequence_cap, and
  weight_floor <= w <= weight_cap; else 0. The source has w = recomputed /
  behav, what the engines differ by, and |exp(mean_t log w) - 1| < delta_seq,
  |w - 1| < delta_tok: around "recomputed", with 1 - delta and 1 + delta as
  bounds, this is its mask but for values on a bound, which are kept here. Its
  loss then clips the whole ratio, pi / behav; see
  `objective.Objective.ratio_to_behavior`. Around another policy w has the
  staleness in it, which the source leaves to the clip.

  We know the formula from three readings of the paper that agree, and the
  authors' own page describes it in words; none has values of the deltas, so
  the defaults are ours.
  Source: HisPO of LongCat-Flash-Prover (https://arxiv.org/abs/2603.21065).
  """
  by_sequence = geometric_mask(
    gaps, sequence_floor=sequence_floor, sequence_cap=sequence_cap
  )
  by_token_BT = _outside(gaps.log_weights_BT, weight_floor, weight_cap)
  return _masked(by_sequence.is_masked_BT | by_token_BT)


# Name -> function; its keyword arguments are fields of the objective.
CORRECTIONS: Mapping[str, Callable[..., Weights]] = {
  "none": no_correction,
  "tis": truncated,
  "icepop": icepop,
  "sequence_mask": sequence_mask,
  "geometric_mask": geometric_mask,
  "hispo": hispo,
}


def _outside(
  logs_BT: Float[jax.Array, "B T"], low: float, high: float
) -> Bool[jax.Array, "B T"]:
  """Whether exp(logs) is outside of the bounds."""
  logs_BT = jnp.clip(logs_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  ratios_BT = jnp.exp(logs_BT)
  return (ratios_BT < low) | (ratios_BT > high)


def _masked(is_masked_BT: Bool[jax.Array, "B T"]) -> Weights:
  return Weights(
    weights_BT=jnp.where(is_masked_BT, 0.0, 1.0),
    is_capped_BT=jnp.zeros(is_masked_BT.shape, bool),
    is_masked_BT=is_masked_BT,
  )
