"""Log-probabilities of the tokens of packed rows, without [B, T, V] logits."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from dora_jax import interfaces
from dora_jax.model import attention, transformer
from dora_jax.trainer import vocabulary


def token_logprobs(
  params: interfaces.Params,
  config: transformer.ModelConfig,
  tokens_BT: Int[jax.Array, "B T"],
  positions_BT: Int[jax.Array, "B T"],
  segment_ids_BT: Int[jax.Array, "B T"],
  *,
  attend: Callable[[jax.Array], attention.Attend],
  dtype: jax.typing.DTypeLike,
  temperature: float,
  learns_entropy: bool,
  remat: bool,
  chunk_size: int,
  hidden_sharding: jax.sharding.Sharding | None = None,
) -> tuple[Float[jax.Array, "B T"], Float[jax.Array, "B T"]]:
  """Log-probability of each token after those before it in its segment.

  Index t speaks of the token at t. The distribution is softmax(logits / T) in
  float32, T the temperature that the generator sampled at.

  Args:
    params: in `dtype`, or a wider one, which their gradients then have.
    config: of the model.
    tokens_BT: packed rows.
    positions_BT: of each token in its own sequence.
    segment_ids_BT: 0 is padding.
    attend: of the segment ids; see attention.base.SegmentAttention.attend.
    dtype: of the forward and backward pass.
    temperature: above 0.
    learns_entropy: lets a gradient flow through the entropies.
    remat: recomputes each layer's activations in the backward pass.
    chunk_size: tokens of each row whose logits exist at one time.
    hidden_sharding: of the residual stream, where XLA should not guess it;
      None where no row is split over devices.

  Returns:
    Log-probabilities in nats, at most 0, and entropies in nats; both are 0
    where a token starts a segment or is padding.
  """
  hidden_BTD, _ = transformer.forward(
    params,
    config,
    tokens_BT,
    positions_BT,
    attend=attend(segment_ids_BT),
    remat=remat,
    hidden_sharding=hidden_sharding,
    dtype=dtype,
  )
  # The hidden state at t draws the token at t + 1. The last one draws nothing;
  # it stays for the sake of an even shape.
  scores = vocabulary.score(
    hidden_BTD,
    transformer.head(params, config),
    jnp.roll(tokens_BT, -1, axis=1),
    temperature,
    chunk_size,
    learns_entropy,
    _count_shares(hidden_BTD, hidden_sharding),
  )
  continues_BT = (segment_ids_BT != 0) & (
    segment_ids_BT == jnp.roll(segment_ids_BT, 1, axis=1)
  )
  # Without the first index: what precedes it is the end of the rolled row.
  continues_BT = continues_BT.at[:, 0].set(False)
  logprobs_BT, entropies_BT = (
    jnp.where(continues_BT, jnp.roll(score_BT, 1, axis=1), 0.0)
    for score_BT in scores
  )
  return logprobs_BT, entropies_BT


def _count_shares(hidden_BTD, sharding) -> int:
  """How many devices each row is split over."""
  if sharding is None:
    return 1
  return hidden_BTD.shape[1] // sharding.shard_shape(hidden_BTD.shape)[1]
