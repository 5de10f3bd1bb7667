"""Scores by chunks have the gradients of the softmax written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.trainer import vocabulary


@pytest.mark.parametrize("num_shares", [1, 2])
def test_gradients_of_logprobs_and_entropies_are_autodiffs(num_shares):
  keys = jax.random.split(jax.random.key(0), 5)
  draw = lambda index, *shape: jax.random.normal(keys[index], shape)
  hidden_BTD, head_VD = draw(0, 2, 10, 8), draw(1, 7, 8)
  targets_BT = jax.random.randint(keys[2], (2, 10), 0, 7, jnp.int32)
  of_logprob_BT, of_entropy_BT = draw(3, 2, 10), draw(4, 2, 10)

  def by_chunks(hidden_BTD, head_VD):
    # Chunks of 4 do not divide a row of 10, nor those of 2 a half of it.
    logprobs_BT, entropies_BT = vocabulary.score(
      hidden_BTD, head_VD, targets_BT, 0.7, 4, True, num_shares
    )
    return jnp.sum(logprobs_BT * of_logprob_BT + entropies_BT * of_entropy_BT)

  def plain(hidden_BTD, head_VD):
    logits_BTV = jnp.einsum("BTD,VD->BTV", hidden_BTD, head_VD) / 0.7
    all_BTV = jax.nn.log_softmax(logits_BTV)
    logprobs_BT = jnp.take_along_axis(all_BTV, targets_BT[..., None], 2)[..., 0]
    entropies_BT = -jnp.sum(jnp.exp(all_BTV) * all_BTV, axis=-1)
    return jnp.sum(logprobs_BT * of_logprob_BT + entropies_BT * of_entropy_BT)

  found, expected = (
    jax.jit(jax.value_and_grad(function, (0, 1)))(hidden_BTD, head_VD)
    for function in (by_chunks, plain)
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected
  )
