"""Pages as attention in plain XLA lays them out, read and written.

A page holds its keys as [K, H, O] and its values as [K, O, H], with O its
positions: so both products of a head are of matrices as they lie in memory, and
XLA transposes nothing.
"""

from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dora_jax.generator import kv_pool
from dora_jax.generator.attention import int8_pages
from dora_jax.model import transformer


def create_pool(
  config: transformer.ModelConfig,
  *,
  where: NamedSharding,
  num_pages: int,
  page_size: int,
  dtype: DTypeLike,
) -> kv_pool.KvPool:
  """Makes a pool of zeros."""
  first = config.num_layers, num_pages, config.num_kv_heads
  keys = (*first, config.head_width, page_size)
  values = (*first, page_size, config.head_width)
  if jnp.dtype(dtype) == jnp.int8:
    return kv_pool.KvPool(
      keys=int8_pages.create(keys, page_size=page_size, where=where),
      values=int8_pages.create(values, page_size=page_size, where=where),
    )
  return kv_pool.KvPool(
    keys=jnp.zeros(keys, dtype, device=where),
    values=jnp.zeros(values, dtype, device=where),
  )


def page_size_of(pool: kv_pool.KvPool) -> int:
  """Token positions of a page."""
  values = pool.values
  if isinstance(values, int8_pages.Int8Pages):
    values = values.rows
  return values.shape[3]


def write_tokens(
  pool: kv_pool.KvPool,
  layer: Int[Array, ""],
  page_B: Int[Array, "B"],
  offset_B: Int[Array, "B"],
  key_BKH: Float[Array, "B K H"],
  value_BKH: Float[Array, "B K H"],
) -> kv_pool.KvPool:
  """Puts one token a slot into its page, in one layer."""
  of_keys = layer, page_B, slice(None), slice(None), offset_B
  of_scale = layer, page_B, slice(None), offset_B
  return kv_pool.KvPool(
    keys=_set(pool.keys, of_keys, of_scale, key_BKH),
    values=_set(pool.values, of_scale, of_scale, value_BKH),
  )


def write_pages(
  pool: kv_pool.KvPool,
  layer: Int[Array, ""],
  page_ids_C: Int[Array, "C"],
  key_SKH: Float[Array, "S K H"],
  value_SKH: Float[Array, "S K H"],
) -> kv_pool.KvPool:
  """Fills pages with one layer's KV of as many tokens as they take."""
  page = (page_ids_C.shape[0], -1, *key_SKH.shape[1:])
  key_CKOH = key_SKH.reshape(page).transpose(0, 2, 1, 3)
  value_CKOH = value_SKH.reshape(page).transpose(0, 2, 1, 3)
  where = layer, page_ids_C
  keys = pool.keys
  if isinstance(keys, int8_pages.Int8Pages):
    rows_CKOH, scale_CKO = int8_pages.quantize(key_CKOH)
    keys = int8_pages.Int8Pages(
      rows=keys.rows.at[where].set(jnp.swapaxes(rows_CKOH, 2, 3)),
      scale_LJKO=keys.scale_LJKO.at[where].set(scale_CKO),
    )
  else:
    key_CKHO = jnp.swapaxes(key_CKOH, 2, 3).astype(keys.dtype)
    keys = keys.at[where].set(key_CKHO)
  values = _set(pool.values, where, where, value_CKOH)
  return kv_pool.KvPool(keys=keys, values=values)


def read_pages(
  pool: kv_pool.KvPool, layer: Int[Array, ""], page_ids_C: Int[Array, "C"]
) -> tuple[Float[Array, "C K H O"], Float[Array, "C K O H"]]:
  """One layer's keys and values of some pages; fp32 where the pool is int8."""
  where = layer, page_ids_C
  if not isinstance(pool.keys, int8_pages.Int8Pages):
    return pool.keys[where], pool.values[where]
  key_scale_CKO = pool.keys.scale_LJKO[where]
  value_scale_CKO = pool.values.scale_LJKO[where]
  return (
    pool.keys.rows[where].astype(jnp.float32) * key_scale_CKO[:, :, None],
    pool.values.rows[where].astype(jnp.float32) * value_scale_CKO[..., None],
  )


def _set(
  kv: Any, where: Any, of_scale: Any, rows: Float[Array, "... H"]
) -> Any:
  """Writes rows of heads at these indices, rounded where the pool is."""
  if not isinstance(kv, int8_pages.Int8Pages):
    return kv.at[where].set(rows.astype(kv.dtype))
  rounded, scale = int8_pages.quantize(rows)
  return int8_pages.Int8Pages(
    rows=kv.rows.at[where].set(rounded),
    scale_LJKO=kv.scale_LJKO.at[of_scale].set(scale),
  )
