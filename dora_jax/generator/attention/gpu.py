"""Attention over pages on GPUs: one Triton kernel for decode and prefill."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dora_jax.generator import kv_pool
from dora_jax.generator.attention import base, gpu_kernel
from dora_jax.model import attention, transformer

_MOST_HEAD_WIDTH = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuAttention:
  """Decodes and prefills by a kernel that reads the pages in use.

  In decoding, several programs share a sequence. cuDNN has no attention over
  pages: a block of a prompt would have to gather all that comes before it.

  A page holds its keys and its values as [K, O, H], O its positions.
  Source: Flash-Decoding (https://pytorch.org/blog/flash-decoding).

  Attributes:
    mesh: of the generator; each device runs the kernel on its own KV heads.
    interpret: whether to simulate the kernel, on whatever devices there are.
  """

  mesh: Mesh
  interpret: bool = False
  name: str = "gpu"

  def find_obstacle(
    self,
    config: transformer.ModelConfig,
    *,
    page_size: int,
    dtype: DTypeLike,
  ) -> str | None:
    """Says why the kernel cannot serve this model, or None."""
    if jnp.dtype(dtype) == jnp.int8:
      return base.NO_INT8
    width = config.head_width
    if not _is_tile(width) or width > _MOST_HEAD_WIDTH:
      return (
        f"config.model.head_width is {width} but must be a power of two from "
        f"{gpu_kernel.LEAST_TILE} to {_MOST_HEAD_WIDTH}"
      )
    if not _is_tile(page_size):
      return (
        f"config.generator.page_size is {page_size} but must be a power of two "
        f"of at least {gpu_kernel.LEAST_TILE}"
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
    page = (config.num_kv_heads, page_size, config.head_width)
    shape = (config.num_layers, num_pages, *page)
    zeros = lambda: jnp.zeros(shape, dtype, device=self.sharding(mesh))
    return kv_pool.KvPool(keys=zeros(), values=zeros())

  def sharding(self, mesh: Mesh) -> NamedSharding:
    """KV heads are split over the tensor axis; all else is everywhere."""
    return NamedSharding(mesh, PartitionSpec(None, None, "tensor"))

  def prefill(
    self,
    start_R: Int[Array, "R"],
    page_table_RC: Int[Array, "R C"],
    filled_RW: Int[Array, "R W"],
  ) -> attention.Attend:
    """Attention of blocks to all before them, which also fills their pages."""
    filled_C = filled_RW.reshape(-1)

    def write(pages_LJKOH, rows_BTKH, layer):
      page = (filled_C.shape[0], -1, *rows_BTKH.shape[2:])
      rows_CKOH = rows_BTKH.reshape(page).swapaxes(1, 2)
      rows_CKOH = rows_CKOH.astype(pages_LJKOH.dtype)
      return pages_LJKOH.at[layer, filled_C].set(rows_CKOH)

    readable_RC = kv_pool.without_trash(page_table_RC)
    return self._attend_after(write, readable_RC, start_R)

  def decode(
    self,
    page_table_BC: Int[Array, "B C"],
    position_B: Int[Array, "B"],
    is_active_B: Bool[Array, "B"],
  ) -> attention.Attend:
    """Attention of one new token a slot over the pages of its request."""

    def write(pages_LJKOH, rows_BTKH, layer):
      page_size = pages_LJKOH.shape[3]
      column_B = position_B // page_size
      page_B = kv_pool.page_at(page_table_BC, column_B, is_active_B)
      rows_BKH = rows_BTKH[:, 0].astype(pages_LJKOH.dtype)
      offset_B = position_B % page_size
      return pages_LJKOH.at[layer, page_B, :, offset_B].set(rows_BKH)

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
      pool = kv_pool.KvPool(
        keys=write(pool.keys, key_BTKH, layer),
        values=write(pool.values, value_BTKH, layer),
      )
      out_BTKGH = self._run_kernel(
        query_BTKGH, pool, page_table_BC, start_B, layer
      )
      return out_BTKGH, pool

    return attend

  def _run_kernel(
    self,
    query_BTKGH: Float[Array, "B T K G H"],
    pool: kv_pool.KvPool,
    page_table_BC: Int[Array, "B C"],
    start_B: Int[Array, "B"],
    layer: Int[Array, ""],
  ) -> Float[Array, "B T K G H"]:
    """Runs the kernel on each device, on the KV heads that it has."""
    # Queries and pools both have their KV heads in the third place.
    heads, everywhere = PartitionSpec(None, None, "tensor"), PartitionSpec()
    return jax.shard_map(
      functools.partial(gpu_kernel.attend_pages, interpret=self.interpret),
      mesh=self.mesh,
      in_specs=(heads, heads, heads, everywhere, everywhere, everywhere),
      out_specs=heads,
      # Nobody knows what varies over devices within the kernel.
      check_vma=False,
    )(query_BTKGH, pool.keys, pool.values, page_table_BC, start_B, layer[None])


def _is_tile(size: int) -> bool:
  return size >= gpu_kernel.LEAST_TILE and size & (size - 1) == 0
