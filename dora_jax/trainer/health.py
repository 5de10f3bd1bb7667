"""Metrics of one train step, computed on the host from what the loss saw.

All shares and means over tokens run over sampled tokens only. With r the ratio
pi / pi_behavior of such a token, clamped as in ratios.log_ratios:

  ess            (sum r)^2 / (n * sum r^2), a share: 1 where all weights agree
  chi2           mean(r^2) - 1, which estimates chi^2(pi || pi_behavior)
  kl_behavior_k1 mean(-log r), and
  kl_behavior_k3 mean(r - 1 - log r): estimate KL(pi_behavior || pi) in nats,
                 for tokens are drawn from pi_behavior
  mismatch_kl_k3 the same where both sides have the same params: what engine and
                 trainer disagree about. Where log-probabilities are recomputed
                 that is known of every token, with k1, ess, chi2 and quantiles;
                 else of tokens of lag 0, and absent where a step has none.
  masked_share   share of tokens that the correction leaves out, and
  weight_capped_share: of those whose weight it has cut. See ratios.Weights.
  kl_ref         the estimate of KL(pi || ref) in nats, before its coefficient
  ratio_one_share share of tokens with r exactly 1. Near 1 in an asynchronous
                 run, it says that behavior log-probabilities were recomputed.
  worst_kl       the largest mean(r - 1 - log r) of a trajectory, and
  worst_group_id, worst_member: which one it is. By the mismatch where that is
                 known of every token.

Sources: k1, k3: http://joschu.net/blog/kl-approx.html; ess: Kong, 1992.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from dora_jax import types
from dora_jax.trainer import gradients, objective
from dora_jax.trainer import ratios as ratios_lib

_QUANTILES = {"min": 0.0, "p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}


def batch_metrics(
  batches: Sequence[types.PackedBatch], stats: Sequence[gradients.TokenStats]
) -> dict[str, float]:
  """Counts of tokens, and the entropy of the sampled ones in nats."""
  num_cells = sum(batch.segment_ids.size for batch in batches)
  num_filled = sum(np.count_nonzero(batch.segment_ids) for batch in batches)
  entropies = _sampled(batches, [s.entropies_BT for s in stats])
  return {
    "num_tokens": float(entropies.size),
    "padding_share": 1.0 - num_filled / num_cells,
    "entropy": float(entropies.mean()),
  }


def ratio_metrics(
  batches: Sequence[types.PackedBatch], stats: Sequence[gradients.TokenStats]
) -> dict[str, float]:
  """How far the params are from those that sampled the tokens."""
  seen = [_seen(s) for s in stats]
  log_ratios = _sampled(batches, [s.log_ratios_BT for s in seen])
  # In float32 as the loss saw it; the sums below are in float64.
  ratio_one_share = float((np.exp(log_ratios) == 1.0).mean())
  metrics = {
    "ratio_one_share": ratio_one_share,
    **_quantiles(log_ratios, "ratio"),
    **_divergences(log_ratios, "", "kl_behavior"),
    "clip_share_low": _share(batches, [s.is_clipped_low_BT for s in seen]),
    "clip_share_high": _share(batches, [s.is_clipped_high_BT for s in seen]),
    "weight_capped_share": _share(batches, [s.is_capped_BT for s in seen]),
    "masked_share": _share(batches, [s.is_masked_BT for s in seen]),
  }
  kls = [s.kl_BT for s in seen if s.kl_BT is not None]
  if kls:
    metrics["kl_ref"] = float(_sampled(batches, kls).mean())
  gaps = [s.gaps_BT for s in stats if s.gaps_BT is not None]
  if gaps:
    gaps = _sampled(batches, gaps)
    metrics |= _quantiles(gaps, "mismatch_ratio")
    return metrics | _divergences(gaps, "mismatch_", "mismatch_kl")
  is_fresh = _sampled(batches, [batch.lags for batch in batches]) == 0
  if is_fresh.any():
    metrics["mismatch_kl_k3"] = float(_k3(log_ratios[is_fresh]).mean())
  return metrics


def worst_trajectory(
  batches: Sequence[types.PackedBatch],
  stats: Sequence[gradients.TokenStats],
  groups: Sequence[types.Group],
) -> dict[str, float]:
  """Which trajectory's tokens fit its recorded log-probabilities worst."""
  log_ratios = _sampled(
    batches,
    [_seen(s).log_ratios_BT if s.gaps_BT is None else s.gaps_BT for s in stats],
  )
  ids = _sampled(batches, [batch.trajectory_ids for batch in batches])
  counts = np.bincount(ids)
  means = np.bincount(ids, weights=_k3(log_ratios)) / np.maximum(counts, 1)
  worst = int(means.argmax())
  trajectory = [t for group in groups for t in group.trajectories][worst]
  return {
    "worst_kl": float(means[worst]),
    "worst_group_id": float(trajectory.group_id),
    "worst_member": float(trajectory.member),
  }


def group_metrics(
  groups: Sequence[types.Group], *, version: int
) -> dict[str, float]:
  """Rewards, lengths in tokens and lags in versions, over trajectories.

  The lag of a trajectory is that of its oldest version.
  """
  rewards = np.concatenate([group.rewards for group in groups])
  trajectories = [t for group in groups for t in group.trajectories]
  lengths = np.array([len(t.completion) for t in trajectories])
  lags = np.array([version - t.version for t in trajectories])
  is_truncated = [t.finish_reason == "length" for t in trajectories]
  is_even = [np.ptp(group.rewards) == 0.0 for group in groups]
  return {
    "reward_mean": float(rewards.mean()),
    "reward_std": float(rewards.std()),
    "zero_advantage_groups": float(np.mean(is_even)),
    "truncated_share": float(np.mean(is_truncated)),
    "length_mean": float(lengths.mean()),
    **_length_by_reward(lengths, rewards),
    "lag_mean": float(lags.mean()),
    "lag_max": float(lags.max()),
    **{
      f"lag_count/{lag}": float(count)
      for lag, count in enumerate(np.bincount(lags))
    },
  }


def _length_by_reward(
  lengths: Int[np.ndarray, "R"], rewards: Float[np.ndarray, "R"]
) -> Mapping[str, float]:
  """Mean length above the batch's mean reward, and of the rest."""
  is_rewarded = rewards > rewards.mean()
  parts = {
    "length_mean_rewarded": lengths[is_rewarded],
    "length_mean_unrewarded": lengths[~is_rewarded],
  }
  return {name: float(part.mean()) for name, part in parts.items() if part.size}


def _seen(stats: gradients.TokenStats) -> objective.Seen:
  assert stats.seen is not None, "of the policy, not of supervised pairs"
  return stats.seen


def _quantiles(log_ratios: np.ndarray, prefix: str) -> dict[str, float]:
  ratios = np.exp(_clamped(log_ratios))
  values = np.quantile(ratios, list(_QUANTILES.values()))
  return {
    f"{prefix}_{name}": float(value)
    for name, value in zip(_QUANTILES, values, strict=True)
  }


def _divergences(
  log_ratios: np.ndarray, prefix: str, kl_name: str
) -> dict[str, float]:
  log_ratios = _clamped(log_ratios)
  ratios = np.exp(log_ratios)
  squares = float((ratios**2).mean())
  return {
    f"{prefix}ess": float(ratios.mean() ** 2 / squares),
    f"{prefix}chi2": squares - 1.0,
    f"{kl_name}_k1": float(-log_ratios.mean()),
    f"{kl_name}_k3": float(_k3(log_ratios).mean()),
  }


def _k3(log_ratios: np.ndarray) -> np.ndarray:
  log_ratios = _clamped(log_ratios)
  return np.exp(log_ratios) - 1.0 - log_ratios


def _clamped(log_ratios: np.ndarray) -> np.ndarray:
  limit = ratios_lib.MAX_LOG_RATIO
  return np.clip(log_ratios.astype(np.float64), -limit, limit)


def _sampled(
  batches: Sequence[types.PackedBatch], values: Sequence[np.ndarray]
) -> np.ndarray:
  """Values of the sampled tokens of all micro-batches, in one array."""
  return np.concatenate(
    [
      value_BT[batch.loss_mask > 0.0]
      for batch, value_BT in zip(batches, values, strict=True)
    ]
  )


def _share(
  batches: Sequence[types.PackedBatch], flags: Sequence[np.ndarray]
) -> float:
  return float(_sampled(batches, flags).mean())
