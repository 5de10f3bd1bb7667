"""Log-probabilities of the tokens of packed rows, without [B, T, V] logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from dora_jax import interfaces
from dora_jax.model import attention, transformer


def token_logprobs(
  params: interfaces.Params,
  config: transformer.ModelConfig,
  tokens_BT: Int[jax.Array, "B T"],
  positions_BT: Int[jax.Array, "B T"],
  segment_ids_BT: Int[jax.Array, "B T"],
  *,
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
    params: computes in their dtype.
    config: of the model.
    tokens_BT: packed rows.
    positions_BT: of each token in its own sequence.
    segment_ids_BT: 0 is padding.
    temperature: above 0.
    learns_entropy: lets a gradient flow through the entropies.
    remat: recomputes each layer's activations in the backward pass.
    chunk_size: tokens of each row whose logits exist at one time. With fewer
      than T, the backward pass recomputes each chunk's logits.
    hidden_sharding: of the residual stream, where XLA should not guess it.

  Returns:
    Log-probabilities in nats, at most 0, and entropies in nats; both are 0
    where a token starts a segment or is padding.
  """
  hidden_BTD, _ = transformer.forward(
    params,
    config,
    tokens_BT,
    positions_BT,
    attend=attention.segment_attention(segment_ids_BT),
    remat=remat,
    hidden_sharding=hidden_sharding,
  )
  # The hidden state at t draws the token at t + 1. The last one draws nothing;
  # it stays for the sake of an even shape.
  targets_BT = jnp.roll(tokens_BT, -1, axis=1)

  def score_chunk(hidden_BTD, targets_BT):
    logits_BTV = transformer.unembed(params, config, hidden_BTD) / temperature
    logprobs_BT, entropies_BT = _score(logits_BTV, targets_BT)
    if not learns_entropy:
      entropies_BT = jax.lax.stop_gradient(entropies_BT)
    return logprobs_BT, entropies_BT

  scores = _by_chunks(score_chunk, hidden_BTD, targets_BT, chunk_size)
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


def _score(logits_BTV, targets_BT):
  """Log-probability of the targets and entropy of softmax(logits)."""
  normalizer_BT1 = jax.nn.logsumexp(logits_BTV, axis=-1, keepdims=True)
  logprobs_BTV = logits_BTV - normalizer_BT1
  # A masked sum instead of a gather: it stays local where the vocabulary is
  # sharded, and its gradient is no scatter, whose order may vary.
  vocabulary_11V = jnp.arange(logits_BTV.shape[-1])[None, None, :]
  is_target_BTV = vocabulary_11V == targets_BT[:, :, None]
  logprobs_BT = jnp.sum(jnp.where(is_target_BTV, logprobs_BTV, 0.0), axis=-1)
  entropies_BT = -jnp.sum(jnp.exp(logprobs_BTV) * logprobs_BTV, axis=-1)
  return logprobs_BT, entropies_BT


def _by_chunks(score_chunk, hidden_BTD, targets_BT, chunk_size):
  """Applies score_chunk to chunks of each row, one after the other."""
  num_rows, row_length, width = hidden_BTD.shape
  if chunk_size >= row_length:
    return score_chunk(hidden_BTD, targets_BT)
  num_chunks = -(-row_length // chunk_size)
  fill = num_chunks * chunk_size - row_length
  # Chunks cut the row, not the batch: rows stay on the devices they are on.
  hidden_BTD = jnp.pad(hidden_BTD, ((0, 0), (0, fill), (0, 0)))
  targets_BT = jnp.pad(targets_BT, ((0, 0), (0, fill)))
  hidden_CBTD = jnp.moveaxis(
    hidden_BTD.reshape(num_rows, num_chunks, chunk_size, width), 1, 0
  )
  targets_CBT = jnp.moveaxis(
    targets_BT.reshape(num_rows, num_chunks, chunk_size), 1, 0
  )
  scores_CBT = jax.lax.map(
    lambda chunk: jax.checkpoint(score_chunk)(*chunk),
    (hidden_CBTD, targets_CBT),
  )
  return tuple(
    jnp.moveaxis(score_CBT, 0, 1).reshape(num_rows, -1)[:, :row_length]
    for score_CBT in scores_CBT
  )
