"""The projection on the vocabulary: logits of a chunk of tokens at a time.

Of a row's logits nothing is kept but the log of their sum, one number a token:
the backward pass makes each chunk's logits once more, and their gradient in
their place. So no [B, T, V] array exists, in either pass. Where rows are split
over devices, each has its part of every chunk.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dora_jax.model import linear


class _Chunking(NamedTuple):
  """Tokens of a row in a chunk, and devices that the row is split over."""

  size: int
  num_shares: int


class _Kept(NamedTuple):
  """What the backward pass needs of a call."""

  hidden_BTD: Array
  head_VD: Array
  targets_BT: Array
  normalizer_BT: Array
  entropies_BT: Array


def score(
  hidden_BTD: Float[Array, "B T D"],
  head_VD: Float[Array, "V D"],
  targets_BT: Int[Array, "B T"],
  temperature: float,
  chunk_size: int,
  learns_entropy: bool,
  num_shares: int,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Log-probability of each target, and entropy, under softmax(logits / T).

  logits = hidden · head, summed and kept in float32. With p the softmax, H its
  entropy and y the target, the gradient of the logits is that of

    log p[y]:  (1[v = y] - p[v]) / T
    H:         -p[v] (log p[v] + H) / T

  Args:
    hidden_BTD: after the final norm.
    head_VD: in the same dtype, or a wider one; gets a gradient of its dtype.
    targets_BT: token ids.
    temperature: T, above 0.
    chunk_size: tokens of each row whose logits exist at one time.
    learns_entropy: lets a gradient flow through the entropies.
    num_shares: devices that each row is split over; a divisor of T.

  Returns:
    Log-probabilities and entropies, in nats.
  """
  chunking = _Chunking(chunk_size, num_shares)
  return _score(
    hidden_BTD, head_VD, targets_BT, temperature, chunking, learns_entropy
  )


def _only_score(*arguments):
  """`_forward`, where no gradient is asked for."""
  return _forward(*arguments)[0]


def _forward(
  hidden_BTD, head_VD, targets_BT, temperature, chunking, learns_entropy
):
  """What `score` gives, and what `_backward` wants."""
  del learns_entropy
  narrow_VD = head_VD.astype(hidden_BTD.dtype)

  def score_chunk(chunk):
    hidden_BTD, targets_BT = chunk
    logits_BTV = _logits(hidden_BTD, narrow_VD, temperature)
    normalizer_BT1 = jax.nn.logsumexp(logits_BTV, axis=-1, keepdims=True)
    logprobs_BTV = logits_BTV - normalizer_BT1
    # A masked sum instead of a gather: it stays local where the vocabulary is
    # sharded.
    is_target_BTV = _is_target(targets_BT, narrow_VD.shape[0])
    logprobs_BT = jnp.sum(jnp.where(is_target_BTV, logprobs_BTV, 0.0), axis=-1)
    entropies_BT = -jnp.sum(jnp.exp(logprobs_BTV) * logprobs_BTV, axis=-1)
    return logprobs_BT, entropies_BT, normalizer_BT1[..., 0]

  chunks = _split((hidden_BTD, targets_BT), chunking)
  scores = jax.lax.map(score_chunk, chunks)
  logprobs_BT, entropies_BT, normalizer_BT = _join(
    scores, targets_BT.shape[1], chunking
  )
  kept = _Kept(hidden_BTD, head_VD, targets_BT, normalizer_BT, entropies_BT)
  return (logprobs_BT, entropies_BT), kept


def _backward(temperature, chunking, learns_entropy, kept, grads):
  """Gradients of hidden states and head; targets have none."""
  dtype = kept.hidden_BTD.dtype
  narrow_VD = kept.head_VD.astype(dtype)
  grad_logprobs_BT, grad_entropies_BT = grads

  def add_chunk(grad_head_DV, chunk):
    hidden_BTD, targets_BT, normalizer_BT, of_logprob_BT, *of_entropy = chunk
    logits_BTV = _logits(hidden_BTD, narrow_VD, temperature)
    logprobs_BTV = logits_BTV - normalizer_BT[..., None]
    chances_BTV = jnp.exp(logprobs_BTV)
    is_target_BTV = _is_target(targets_BT, narrow_VD.shape[0])
    of_logprob_BT1 = of_logprob_BT[..., None]
    slopes_BTV = jnp.where(is_target_BTV, of_logprob_BT1, 0.0)
    slopes_BTV -= of_logprob_BT1 * chances_BTV
    if learns_entropy:
      grad_BT, entropies_BT = of_entropy
      tilted_BTV = chances_BTV * (logprobs_BTV + entropies_BT[..., None])
      slopes_BTV -= grad_BT[..., None] * tilted_BTV
    slopes_BTV = (slopes_BTV / temperature).astype(dtype)
    grad_hidden_BTD = jnp.einsum("BTV,VD->BTD", slopes_BTV, narrow_VD)
    # The narrow array first: that is the one XLA turns around on CPU.
    grad_head_DV += linear.summed(
      "BTD,BTV->DV", hidden_BTD, slopes_BTV, jnp.float32
    )
    return grad_head_DV, grad_hidden_BTD

  arrays = [kept.hidden_BTD, kept.targets_BT, kept.normalizer_BT]
  arrays.append(grad_logprobs_BT)
  if learns_entropy:
    arrays += [grad_entropies_BT, kept.entropies_BT]
  none_DV = jnp.zeros(kept.head_VD.shape[::-1], jnp.float32)
  grad_head_DV, parts_CBTD = jax.lax.scan(
    add_chunk, none_DV, _split(arrays, chunking)
  )
  row_length = kept.targets_BT.shape[1]
  (grad_hidden_BTD,) = _join((parts_CBTD,), row_length, chunking)
  return grad_hidden_BTD, grad_head_DV.T.astype(kept.head_VD.dtype), None


_score: Any = jax.custom_vjp(_only_score, nondiff_argnums=(3, 4, 5))
_score.defvjp(_forward, _backward)


def _logits(hidden_BTD, head_VD, temperature):
  """Logits over the temperature, in float32."""
  logits_BTV = linear.summed("BTD,VD->BTV", hidden_BTD, head_VD, jnp.float32)
  return logits_BTV / temperature


def _is_target(targets_BT, vocab_size):
  """Which token of the vocabulary is the target."""
  vocabulary_11V = jnp.arange(vocab_size, dtype=jnp.int32)[None, None, :]
  return vocabulary_11V == targets_BT[:, :, None]


def _split(arrays, chunking):
  """[B, T, ...] arrays as [C, B, chunk, ...], the last chunk filled with 0.

  Chunks cut the rows, not the batch, and of a row that is split each share:
  tokens stay on the devices they are on.
  """
  num_shares = chunking.num_shares
  share = arrays[0].shape[1] // num_shares
  width = min(-(-chunking.size // num_shares), share)
  num_chunks = -(-share // width)
  fill = num_chunks * width - share

  def split(values):
    num_rows, _, *rest = values.shape
    shares = values.reshape(num_rows, num_shares, share, *rest)
    padding = [(0, 0), (0, 0), (0, fill), *((0, 0) for _ in rest)]
    cut = (num_rows, num_shares, num_chunks, width, *rest)
    chunks = jnp.moveaxis(jnp.pad(shares, padding).reshape(cut), 2, 0)
    return chunks.reshape(num_chunks, num_rows, num_shares * width, *rest)

  return tuple(split(values) for values in arrays)


def _join(arrays, row_length, chunking):
  """Undoes `_split`."""
  num_shares = chunking.num_shares

  def join(values):
    num_chunks, num_rows, _, *rest = values.shape
    chunks = values.reshape(num_chunks, num_rows, num_shares, -1, *rest)
    shares = jnp.moveaxis(chunks, 0, 2).reshape(num_rows, num_shares, -1, *rest)
    kept = shares[:, :, : row_length // num_shares]
    return kept.reshape(num_rows, row_length, *rest)

  return tuple(join(values) for values in arrays)
