"""Log-probabilities equal those of each sequence alone, taken the slow way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.model import attention, transformer
from dora_jax.trainer import logprobs
from dora_jax.trainer.attention import xla
from tests.trainer import tiny


def _batch():
  (batch,) = tiny.pack(tiny.make_groups(), row_length=24, rows_per_batch=12)
  return batch


@functools.partial(
  jax.jit, static_argnames=("temperature", "remat", "chunk_size")
)
def _packed(params, tokens_BT, positions_BT, segment_ids_BT, **settings):
  return logprobs.token_logprobs(
    params,
    tiny.CONFIG,
    tokens_BT,
    positions_BT,
    segment_ids_BT,
    attend=xla.XlaAttention().attend,
    dtype=jnp.float32,
    learns_entropy=False,
    **settings,
  )


@jax.jit
def _logits(params, tokens_BT):
  """Logits of rows that hold one sequence each, from position 0."""
  positions_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
  hidden_BTD, _ = transformer.forward(
    params,
    tiny.CONFIG,
    tokens_BT,
    jnp.broadcast_to(positions_T[None], tokens_BT.shape),
    attend=attention.causal_attention(),
  )
  return transformer.unembed(params, tiny.CONFIG, hidden_BTD)


def _alone(params, tokens, temperature):
  """The definition: the whole softmax of one sequence, token by token."""
  # What comes after a token has no say in its logits: any filling will do.
  filled = np.full((1, 24), 7, np.int32)
  filled[0, : len(tokens)] = tokens
  logits_TV = np.asarray(_logits(params, filled), np.float64)[0] / temperature
  chances_TV = np.exp(logits_TV)
  chances_TV /= chances_TV.sum(axis=-1, keepdims=True)
  score = [np.log(chances_TV[t - 1, tokens[t]]) for t in range(1, len(tokens))]
  entropy = -(chances_TV * np.log(chances_TV)).sum(axis=-1)
  return np.array([0.0, *score]), np.array([0.0, *entropy[: len(score)]])


@pytest.mark.parametrize(
  "temperature, remat, chunk_size",
  [(1.0, False, 24), (0.6, True, 7)],
)
def test_packed_equals_alone(temperature, remat, chunk_size):
  batch, params = _batch(), tiny.make_params()
  logprobs_BT, entropies_BT = _packed(
    params,
    batch.tokens,
    batch.positions,
    batch.segment_ids,
    temperature=temperature,
    remat=remat,
    chunk_size=chunk_size,
  )
  num_compared = 0
  for row, ids in enumerate(batch.segment_ids):
    assert not logprobs_BT[row][ids == 0].any()
    assert not entropies_BT[row][ids == 0].any()
    for segment_id in range(1, ids.max() + 1):
      inside = ids == segment_id
      expected = _alone(params, batch.tokens[row][inside], temperature)
      for found_BT, values in zip(
        (logprobs_BT, entropies_BT), expected, strict=True
      ):
        np.testing.assert_allclose(found_BT[row][inside], values, atol=1e-5)
      num_compared += 1
  assert num_compared == 12
  assert (logprobs_BT <= 0.0).all()


def test_chunks_change_neither_values_nor_gradients():
  batch, params = _batch(), tiny.make_params()
  arrays = batch.tokens, batch.positions, batch.segment_ids

  @functools.partial(jax.jit, static_argnums=(1, 2))
  @jax.grad
  def gradient(params, chunk_size, remat):
    logprobs_BT, _ = _packed(
      params, *arrays, temperature=1.0, remat=remat, chunk_size=chunk_size
    )
    return logprobs_BT.sum()

  expected = gradient(params, 24, False)
  found = gradient(params, 7, True)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), found, expected
  )


def test_logits_of_whole_rows_never_exist_with_chunks():
  batch, params = _batch(), tiny.make_params()
  score = functools.partial(
    logprobs.token_logprobs,
    attend=xla.XlaAttention().attend,
    dtype=jnp.float32,
    temperature=1.0,
    learns_entropy=False,
    remat=False,
    chunk_size=6,
  )

  def total(params):
    return score(
      params,
      tiny.CONFIG,
      jnp.asarray(batch.tokens),
      jnp.asarray(batch.positions),
      jnp.asarray(batch.segment_ids),
    )[0].sum()

  whole = f"f32[{batch.tokens.shape[0]},24,{tiny.CONFIG.vocab_size}]"
  stacked = f"f32[4,{batch.tokens.shape[0]},6,{tiny.CONFIG.vocab_size}]"
  traced = str(jax.make_jaxpr(jax.grad(total))(params))
  assert whole not in traced and stacked not in traced
