"""Draws one token for each slot, with randomness that depends on nothing else.

The key of a draw is a function of (run seed, stream, group, member, position):
neither the slot, the company, the order of arrival nor the generator matters,
so a request that moves, or is run again, draws the same tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray


def request_key(
  seed_key: PRNGKeyArray,
  stream: Int[Array, ""],
  group_id: Int[Array, ""],
  member: Int[Array, ""],
) -> PRNGKeyArray:
  """The part of a draw's key that is the same for all tokens of a request."""
  key = seed_key
  for counter in (stream, group_id, member):
    key = jax.random.fold_in(key, counter)
  return key


def draw_key(
  seed_key: PRNGKeyArray,
  stream: Int[Array, ""],
  group_id: Int[Array, ""],
  member: Int[Array, ""],
  position: Int[Array, ""],
) -> PRNGKeyArray:
  """The key that draws one token.

  Args:
    seed_key: made from the run's seed.
    stream: family of draws; training is 0, evaluation 1.
    group_id: the group of the request.
    member: its index in the group.
    position: index of the drawn token in its sequence, the prompt included.

  Returns:
    A scalar key.
  """
  key = request_key(seed_key, stream, group_id, member)
  return jax.random.fold_in(key, position)


def sample(
  logits_BV: Float[Array, "B V"],
  keys_B: Key[Array, "B"],
  temperature_B: Float[Array, "B"],
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """Draws a token a row from softmax(logits / temperature), by Gumbel noise.

  token = argmax(logits / temperature + Gumbel noise)
  logprob = log_softmax(logits / temperature)[token]

  Temperature 0 takes the likeliest token. The log-probability is then that of
  the untempered distribution (temperature 1): the limit puts probability 1 on
  its one token, which would tell nothing.

  Args:
    logits_BV: fp32, untempered.
    keys_B: one key a row, used for nothing else.
    temperature_B: at least 0.

  Returns:
    Tokens, and their log-probabilities in nats, at most 0, fp32.
  """
  if logits_BV.dtype != jnp.float32:
    raise TypeError(f"Logits must be float32, not {logits_BV.dtype}.")
  is_greedy_B = temperature_B == 0
  divisor_B = jnp.where(is_greedy_B, 1.0, temperature_B)
  scaled_BV = logits_BV / divisor_B[:, None]
  drawn_B = jax.vmap(jax.random.categorical)(keys_B, scaled_BV)
  tokens_B = jnp.where(is_greedy_B, logits_BV.argmax(axis=-1), drawn_B)
  logprobs_BV = jax.nn.log_softmax(scaled_BV, axis=-1)
  logprobs_B = jnp.take_along_axis(logprobs_BV, tokens_B[:, None], axis=-1)[
    :, 0
  ]
  return tokens_B.astype(jnp.int32), jnp.minimum(logprobs_B, 0.0)
