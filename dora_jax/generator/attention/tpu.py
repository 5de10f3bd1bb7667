"""Attention over pages on TPUs: one Pallas kernel for decode and prefill."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dora_jax.generator import kv_pool
from dora_jax.generator.attention import base, tpu_kernel
from dora_jax.model import attention, transformer

# Registers are of 8 rows of 128 lanes, of 4 bytes each.
_LANES, _ROWS, _BYTES = 128, 8, 4


def _count_padding(head_width: int) -> int:
  """Zeros that make a head fill whole lanes: the kernel reads no less."""
  return -head_width % _LANES


def _count_rows(dtype: DTypeLike) -> int:
  """Rows of a register of this dtype: 8 of float32, 16 of bfloat16."""
  return _ROWS * _BYTES // jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuAttention:
  """Decodes and prefills by a kernel that reads the pages in use.

  A page is [W, K, E, R, H]: W times R positions, R as many as a register has
  rows, and along E, of size 2, the keys of a head and then its values. So one
  copy fetches it all, and a token is written by replacing a register's rows:
  XLA would turn the whole pool around to write within one. `KvPool.keys` is it.

  Heads are padded to whole lanes, twice the bytes for a width of 64: on a TPU
  plain XLA would need several times the pool, which it turns around to write.

  JAX ships `ragged_paged_attention` for this, but neither of its two ways to
  interpret a kernel can run that one: nothing could be compared without a TPU.

  Attributes:
    mesh: of the generator; each device runs the kernel on its own KV heads.
    interpret: whether to simulate the kernel, on whatever devices there are.
  """

  mesh: Mesh
  interpret: bool = False
  name: str = "tpu"

  def find_obstacle(
    self,
    config: transformer.ModelConfig,
    *,
    page_size: int,
    dtype: DTypeLike,
  ) -> str | None:
    """Says why the kernel cannot serve this model, or None."""
    del config
    if jnp.dtype(dtype) == jnp.int8:
      return base.NO_INT8
    rows = _count_rows(dtype)
    if page_size % rows:
      return (
        f"config.generator.page_size is {page_size} but must be a multiple "
        f"of {rows}"
      )
    return None

  def create_pool(
    self,
    config: transformer.ModelConfig,
    *,
    mesh: Mesh,
    num_pages: int,
    page_size: int,
    dtype: DTypeLike,
  ) -> kv_pool.KvPool:
    """Makes a pool of zeros in its place, never whole on one device."""
    rows = _count_rows(dtype)
    width = config.head_width + _count_padding(config.head_width)
    page = (page_size // rows, config.num_kv_heads, 2, rows, width)
    shape = (config.num_layers, num_pages, *page)
    zeros = jnp.zeros(shape, dtype, device=self.sharding(mesh))
    return kv_pool.KvPool(keys=zeros, values=None)

  def sharding(self, mesh: Mesh) -> NamedSharding:
    """KV heads are split over the tensor axis; all else is everywhere."""
    return NamedSharding(mesh, PartitionSpec(None, None, None, "tensor"))

  def prefill(
    self,
    start_R: Int[Array, "R"],
    page_table_RC: Int[Array, "R C"],
    filled_RW: Int[Array, "R W"],
  ) -> attention.Attend:
    """Attention of blocks to all before them, which also fills their pages."""

    def write(pool_LJWKERH, kv_BTKEH, layer):
      # W times R of the pool are positions of a page.
      *_, num_sets, _, _, num_rows, _ = pool_LJWKERH.shape
      kv_CWRKEH = kv_BTKEH.reshape(-1, num_sets, num_rows, *kv_BTKEH.shape[2:])
      kv_CWKERH = jnp.moveaxis(kv_CWRKEH, 2, 4)
      return pool_LJWKERH.at[layer, filled_RW.reshape(-1)].set(kv_CWKERH)

    readable_RC = kv_pool.without_trash(page_table_RC)
    return self._attend_after(write, readable_RC, start_R)

  def decode(
    self,
    page_table_BC: Int[Array, "B C"],
    position_B: Int[Array, "B"],
    is_active_B: Bool[Array, "B"],
  ) -> attention.Attend:
    """Attention of one new token a slot over the pages of its request."""

    def write(pool_LJWKERH, kv_BTKEH, layer):
      _, _, num_sets, *_, num_rows, _ = pool_LJWKERH.shape
      set_B = position_B // num_rows
      column_B = set_B // num_sets
      page_B = kv_pool.page_at(page_table_BC, column_B, is_active_B)
      where = layer, page_B, set_B % num_sets
      row_B1 = position_B[:, None] % num_rows
      is_new_BR = jnp.arange(num_rows)[None] == row_B1
      rows_BKERH = jnp.where(
        is_new_BR[:, None, None, :, None],
        kv_BTKEH[:, 0, :, :, None],
        pool_LJWKERH[where],
      )
      return pool_LJWKERH.at[where].set(rows_BKERH)

    # A slot without a request reads as little as it can.
    start_B = jnp.where(is_active_B, position_B, 0)
    return self._attend_after(write, page_table_BC, start_B)

  def _attend_after(
    self,
    write: Callable[..., Array],
    page_table_BC: Int[Array, "B C"],
    start_B: Int[Array, "B"],
  ) -> attention.Attend:
    """The callback that writes the new keys and values, then attends."""

    def attend(query_BTKGH, key_BTKH, value_BTKH, pool, layer):
      width = query_BTKGH.shape[-1]
      padding = [(0, 0)] * 4 + [(0, _count_padding(width))]
      kv_BTKEH = jnp.pad(jnp.stack((key_BTKH, value_BTKH), axis=3), padding)
      pool_LJWKERH = write(pool.keys, kv_BTKEH.astype(pool.keys.dtype), layer)
      out_BTKGH = self._run_kernel(
        jnp.pad(query_BTKGH, padding).astype(pool_LJWKERH.dtype),
        pool_LJWKERH,
        page_table_BC,
        start_B,
        layer,
        scale=width**-0.5,
      )
      pool = dataclasses.replace(pool, keys=pool_LJWKERH)
      return out_BTKGH[..., :width].astype(query_BTKGH.dtype), pool

    return attend

  def _run_kernel(
    self,
    query_BTKGH: Float[Array, "B T K G H"],
    pool_LJWKERH: Float[Array, "L J W K 2 R H"],
    page_table_BC: Int[Array, "B C"],
    start_B: Int[Array, "B"],
    layer: Int[Array, ""],
    *,
    scale: float,
  ) -> Float[Array, "B T K G H"]:
    """Runs the kernel on each device, on the KV heads that it has."""
    heads, everywhere = PartitionSpec(None, None, "tensor"), PartitionSpec()
    return jax.shard_map(
      functools.partial(
        tpu_kernel.attend_pages, scale=scale, interpret=self.interpret
      ),
      mesh=self.mesh,
      in_specs=(
        heads,
        self.sharding(self.mesh).spec,
        everywhere,
        everywhere,
        everywhere,
      ),
      out_specs=heads,
      # Nobody knows what varies over devices within the kernel.
      check_vma=False,
    )(query_BTKGH, pool_LJWKERH, page_table_BC, start_B, layer)
