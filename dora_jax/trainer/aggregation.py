"""From losses of tokens to the loss of a step.

A step's loss is sum(weight * loss) / denominator over the sampled tokens of all
its micro-batches:

                  weight of a token     denominator
  token_mean      1                     sampled tokens
  sequence_mean   1 / tokens of its     sequences
                  sequence
  constant        1                     sequences * constant_length

The denominator is one number for the whole step, found before it, so that
neither packing nor micro-batches nor devices change the gradient. It counts
what is sampled and trained on, whether or not a correction then masks it.

Each choice has its bias. token_mean weighs long sequences more. sequence_mean
makes each token of a long wrong answer cost less than one of a short one, so
that wrong answers grow. constant does neither, but the size of its gradient
changes with the mean length.
Sources: DAPO, section 3.3 (https://arxiv.org/abs/2503.14476); GRPO
(https://arxiv.org/abs/2402.03300); Dr. GRPO, section 3
(https://arxiv.org/abs/2503.20783).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from dora_jax import types
from dora_jax.trainer import segments

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


def token_weights(
  kind: str,
  loss_mask_BT: Float[jax.Array, "B T"],
  segment_ids_BT: Int[jax.Array, "B T"],
) -> Float[jax.Array, "B T"]:
  """The weight of each token; of no meaning where it is not sampled."""
  if kind != "sequence_mean":
    return jnp.ones_like(loss_mask_BT)
  lengths_BT = segments.sums(loss_mask_BT, segment_ids_BT)
  return 1.0 / jnp.maximum(lengths_BT, 1.0)


def denominator(
  kind: str, batches: Sequence[types.PackedBatch], *, constant_length: int
) -> np.float32:
  """What the weighted sum over all micro-batches is divided by."""
  match kind:
    case "token_mean":
      return np.float32(sum(batch.loss_mask.sum() for batch in batches))
    case "sequence_mean":
      return np.float32(_num_sequences(batches))
    case "constant":
      return np.float32(_num_sequences(batches) * constant_length)
    case unknown:
      raise ValueError(f"Unknown aggregation {unknown!r}, need {AGGREGATIONS}.")


def weighted_sum(
  values_BT: Float[jax.Array, "B T"],
  weights_BT: Float[jax.Array, "B T"],
  loss_mask_BT: Float[jax.Array, "B T"],
) -> Float[jax.Array, ""]:
  """Sums where the mask is set; other values may even be NaN."""
  return jnp.sum(jnp.where(loss_mask_BT > 0.0, weights_BT * values_BT, 0.0))


def _num_sequences(batches: Sequence[types.PackedBatch]) -> int:
  """Sequences with a sampled token."""
  count = 0
  for batch in batches:
    ids_BT = np.where(batch.loss_mask > 0.0, batch.segment_ids, 0)
    count += sum(len(np.unique(ids_T[ids_T > 0])) for ids_T in ids_BT)
  return count
