"""What a generator computes on its mesh: pure functions, for Engine to compile.

What lives there is the params (an argument of each function, so that another
version is another argument), the KvPool of the mesh and the Slots of a lane.

A prompt of n tokens is prefilled (prefill.py) up to its last token; that one
enters the slot and is the first to be decoded. So every token is sampled by
`decode`, and the members of a group read the same pages without anyone storing
logits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dora_jax import interfaces
from dora_jax.generator import kv_pool, sampling
from dora_jax.generator.attention import base
from dora_jax.model import attention, rope, transformer

# Of one request, beside those of the tokenizer.
MAX_STOP_IDS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
  """Params and their version, in one pytree so that they cannot part.

  Attributes:
    version: the policy version, an int32 scalar on the mesh.
    params: its params, on the mesh.
  """

  version: Any
  params: interfaces.Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
  """The decode batch of one lane; donated to the functions that take it.

  Attributes:
    page_table_BC: pages of each slot's request in order of position; 0 past
      its last one.
    token_B: the token to feed next.
    position_B: its position in its sequence.
    last_position_B: position of the last token that may be sampled.
    rules: of the sampling distribution.
    stop_ids_BE: stop tokens of the request alone; -1 past its last one.
    key_B: random key of the request; each draw folds its position in.
    is_active_B: whether the slot has a request that is not finished and not
      paused.
  """

  page_table_BC: Any
  token_B: Any
  position_B: Any
  last_position_B: Any
  rules: sampling.Rules
  stop_ids_BE: Any
  key_B: Any
  is_active_B: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Entries:
  """Requests on their way into slots; row b is for slot b.

  Attributes:
    page_table_BC: as in Slots, and so are the next five.
    token_B: the token to feed next: the last one that it has.
    position_B: its position.
    last_position_B: position of the last token that may be sampled.
    rules: of the sampling distribution.
    stop_ids_BE: stop tokens of the request alone.
    draw_B3: stream, group_id and member, which fix the random draws.
    is_new_B: whether a request enters the slot; the row is ignored if not.
    copies_B2: pages to copy, as (source, target).
    num_copies: how many of those rows count.
  """

  page_table_BC: Any
  token_B: Any
  position_B: Any
  last_position_B: Any
  rules: sampling.Rules
  stop_ids_BE: Any
  draw_B3: Any
  is_new_B: Any
  copies_B2: Any
  num_copies: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """What a chunk of decode steps sampled, on the host.

  Attributes:
    token_TB: the token that each slot drew in each step.
    logprob_TB: its log-probability in nats.
    kept_mass_TB: see sampling.Drawn.
    version_TB: version of the params that it was drawn with.
    is_sampled_TB: whether the slot drew a token; the rest means nothing where
      not. A slot draws from the first step of a chunk on, or not at all.
  """

  token_TB: Int[np.ndarray, "T B"]
  logprob_TB: Float[np.ndarray, "T B"]
  kept_mass_TB: Float[np.ndarray, "T B"]
  version_TB: Int[np.ndarray, "T B"]
  is_sampled_TB: Bool[np.ndarray, "T B"]


def unpack_chunk(packed_TFB: Int[np.ndarray, "T F B"]) -> Chunk:
  """Takes apart what `decode` gives: one array, for one transfer."""
  token_TB, logprob_TB, mass_TB, version_TB, is_sampled_TB = np.moveaxis(
    packed_TFB, 1, 0
  )
  return Chunk(
    token_TB=token_TB,
    logprob_TB=logprob_TB.view(np.float32),
    kept_mass_TB=mass_TB.view(np.float32),
    version_TB=version_TB,
    is_sampled_TB=is_sampled_TB.astype(np.bool_),
  )


def _pack_row(
  drawn: sampling.Drawn, version: Int[Array, ""], is_sampled_B: Bool[Array, "B"]
) -> Int[Array, "F B"]:
  """What a decode step sampled, in the order of Chunk's fields."""
  bits = lambda floats_B: jax.lax.bitcast_convert_type(floats_B, jnp.int32)
  rows = (
    drawn.token_B,
    bits(drawn.logprob_B),
    bits(drawn.kept_mass_B),
    jnp.full_like(drawn.token_B, version),
    is_sampled_B.astype(jnp.int32),
  )
  return jnp.stack(rows)


def create_slots(num_slots: int, table_width: int) -> Slots:
  """A decode batch without requests."""
  zeros = lambda dtype: jnp.zeros(num_slots, dtype)
  return Slots(
    page_table_BC=jnp.zeros((num_slots, table_width), jnp.int32),
    token_B=zeros(jnp.int32),
    position_B=zeros(jnp.int32),
    last_position_B=zeros(jnp.int32),
    rules=sampling.Rules(
      temperature_B=zeros(jnp.float32),
      top_k_B=zeros(jnp.int32),
      top_p_B=zeros(jnp.float32),
      min_p_B=zeros(jnp.float32),
    ),
    stop_ids_BE=jnp.full((num_slots, MAX_STOP_IDS), -1, jnp.int32),
    key_B=jax.random.split(jax.random.key(0), num_slots),
    is_active_B=zeros(jnp.bool_),
  )


def insert(
  pool: kv_pool.KvPool, slots: Slots, seed_key: PRNGKeyArray, new: Entries
) -> tuple[kv_pool.KvPool, Slots]:
  """Puts requests into slots; copies the pages that they may not share."""
  pool = kv_pool.copy_pages(pool, new.copies_B2, new.num_copies)
  entered = Slots(
    page_table_BC=new.page_table_BC,
    token_B=new.token_B,
    position_B=new.position_B,
    last_position_B=new.last_position_B,
    rules=new.rules,
    stop_ids_BE=new.stop_ids_BE,
    key_B=jax.vmap(lambda draw: sampling.request_key(seed_key, *draw))(
      new.draw_B3
    ),
    is_active_B=new.is_new_B,
  )

  def choose(new_row, old_row):
    is_new = new.is_new_B.reshape((-1,) + (1,) * (old_row.ndim - 1))
    return jnp.where(is_new, new_row, old_row)

  return pool, jax.tree.map(choose, entered, slots)


def switch(
  slots: Slots, is_meant_B: Bool[Array, "B"], is_active: Bool[Array, ""]
) -> Slots:
  """Pauses or resumes the slots that are meant; nothing else changes."""
  return dataclasses.replace(
    slots, is_active_B=jnp.where(is_meant_B, is_active, slots.is_active_B)
  )


def decode(
  served: Served,
  pool: kv_pool.KvPool,
  slots: Slots,
  enough_ended: Int[Array, ""],
  *,
  config: transformer.ModelConfig,
  paged: base.PagedAttention,
  chunk_steps: int,
  stop_ids: tuple[int, ...],
) -> tuple[kv_pool.KvPool, Slots, Int[Array, "T F B"]]:
  """Samples up to chunk_steps tokens for each active slot.

  A slot becomes inactive once it draws a stop token or reaches its limit; the
  chunk ends early once enough_ended slots became so, or none is active.
  """
  num_begun = slots.is_active_B.sum()
  packed_TFB = jnp.zeros(
    (chunk_steps, len(dataclasses.fields(Chunk)), slots.token_B.shape[0]),
    jnp.int32,
  )

  # Within the loop XLA would compute them anew in each layer, for each head.
  step_T1 = jnp.arange(chunk_steps, dtype=jnp.int32)[:, None]
  rotation = transformer.find_rotation(config, slots.position_B[None] + step_T1)

  def goes_on(carry):
    step, _, slots, _ = carry
    num_active = slots.is_active_B.sum()
    is_enough = num_begun - num_active >= enough_ended
    return (step < chunk_steps) & (num_active > 0) & ~is_enough

  def decode_step(carry):
    step, pool, slots, packed_TFB = carry
    pool, drawn = _draw_tokens(
      served.params,
      pool,
      slots,
      jax.tree.map(lambda steps: steps[step, :, None], rotation),
      config,
      paged,
    )
    row_FB = _pack_row(drawn, served.version, slots.is_active_B)
    packed_TFB = packed_TFB.at[step].set(row_FB)
    slots = _advance(slots, drawn.token_B, stop_ids)
    return step + 1, pool, slots, packed_TFB

  start = (jnp.int32(0), pool, slots, packed_TFB)
  _, pool, slots, packed_TFB = jax.lax.while_loop(goes_on, decode_step, start)
  return pool, slots, packed_TFB


def _draw_tokens(
  params: interfaces.Params,
  pool: kv_pool.KvPool,
  slots: Slots,
  rotation: rope.Rotation,
  config: transformer.ModelConfig,
  paged: base.PagedAttention,
) -> tuple[kv_pool.KvPool, sampling.Drawn]:
  """Feeds each slot's token and draws the one after it."""
  attend = paged.decode(
    slots.page_table_BC, slots.position_B, slots.is_active_B
  )
  hidden_BTD, pool = transformer.forward(
    params,
    config,
    slots.token_B[:, None],
    rotation,
    attend=attend,
    kv=pool,
  )
  logits_BV = transformer.unembed(params, config, hidden_BTD[:, 0])
  keys_B = jax.vmap(jax.random.fold_in)(slots.key_B, slots.position_B + 1)
  drawn = sampling.sample(logits_BV, keys_B, slots.rules, slots.is_active_B)
  return pool, drawn


def _advance(
  slots: Slots, tokens_B: Int[Array, "B"], stop_ids: tuple[int, ...]
) -> Slots:
  """The slots after they drew these tokens; inactive ones do not change."""
  position_B = slots.position_B + 1
  is_stop_B = jnp.isin(tokens_B, jnp.array(stop_ids, jnp.int32))
  is_stop_B |= (tokens_B[:, None] == slots.stop_ids_BE).any(axis=-1)
  is_last_B = is_stop_B | (position_B >= slots.last_position_B)
  return dataclasses.replace(
    slots,
    token_B=jnp.where(slots.is_active_B, tokens_B, slots.token_B),
    position_B=jnp.where(slots.is_active_B, position_B, slots.position_B),
    is_active_B=slots.is_active_B & ~is_last_B,
  )


def score(
  params: interfaces.Params,
  tokens_T: Int[Array, "T"],
  length: Int[Array, ""],
  *,
  config: transformer.ModelConfig,
) -> Float[Array, "T"]:
  """Log-probability in nats of each token after those before it; first is 0.

  At temperature 1, by the dense attention that prefill uses.
  """
  positions_BT = jnp.arange(tokens_T.shape[0], dtype=jnp.int32)[None]
  is_real_BT = positions_BT < length
  hidden_BTD, _ = transformer.forward(
    params,
    config,
    tokens_T[None],
    positions_BT,
    attend=attention.segment_attention(is_real_BT.astype(jnp.int32)),
  )
  logits_TV = transformer.unembed(params, config, hidden_BTD[0])
  logprobs_TV = jax.nn.log_softmax(logits_TV[:-1], axis=-1)
  logprobs_T = jnp.take_along_axis(logprobs_TV, tokens_T[1:, None], axis=-1)
  return jnp.pad(logprobs_T[:, 0], (1, 0))
