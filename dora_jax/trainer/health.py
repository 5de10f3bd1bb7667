"""Metrics of one train step, computed on the host from what the loss saw.

All shares and means over tokens run over sampled tokens only. With r the ratio
pi / pi_behavior of such a token, clamped as in losses.ppo_clip:

  ess            (sum r)^2 / (n * sum r^2), a share: 1 where all weights agree
  kl_behavior_k1 mean(-log r), and
  kl_behavior_k3 mean(r - 1 - log r): estimate KL(pi_behavior || pi) in nats,
                 for tokens are drawn from pi_behavior
  mismatch_kl_k3 the same over tokens of lag 0, where both sides have the same
                 params: what engine and trainer disagree about. Absent where
                 the step has no such token.
  weight_capped_share share of tokens whose weight losses.decoupled_ppo has cut
                 to its cap; 0 in ppo_clip.
  ratio_one_share share of tokens with r exactly 1. Near 1 in an asynchronous
                 run, it says that behavior log-probabilities were recomputed.

Sources: k1, k3: http://joschu.net/blog/kl-approx.html; ess: Kong, 1992.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from dora_jax import types
from dora_jax.trainer import gradients

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
  log_ratios = _sampled(batches, [s.log_ratios_BT for s in stats])
  # In float32 as the loss saw it; the sums below are in float64.
  ratio_one_share = float((np.exp(log_ratios) == 1.0).mean())
  log_ratios = log_ratios.astype(np.float64)
  ratios = np.exp(log_ratios)
  lags = _sampled(batches, [batch.lags for batch in batches])
  quantiles = np.quantile(ratios, list(_QUANTILES.values()))
  metrics = {
    f"ratio_{name}": float(value)
    for name, value in zip(_QUANTILES, quantiles, strict=True)
  }
  k3 = ratios - 1.0 - log_ratios
  metrics |= {
    "ratio_one_share": ratio_one_share,
    "ess": float(ratios.sum() ** 2 / (ratios.size * (ratios**2).sum())),
    "kl_behavior_k1": float(-log_ratios.mean()),
    "kl_behavior_k3": float(k3.mean()),
    "clip_share_low": _share(batches, [s.is_clipped_low_BT for s in stats]),
    "clip_share_high": _share(batches, [s.is_clipped_high_BT for s in stats]),
    "weight_capped_share": _share(batches, [s.is_capped_BT for s in stats]),
  }
  if (lags == 0).any():
    metrics["mismatch_kl_k3"] = float(k3[lags == 0].mean())
  return metrics


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
