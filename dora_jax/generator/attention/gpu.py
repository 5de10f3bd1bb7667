"""Attention over pages on GPUs: a Triton kernel, and cuDNN for prefill."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from dora_jax.generator import kv_pool
from dora_jax.generator.attention import base, gpu_kernel, gpu_prefill
from dora_jax.model import attention, transformer

_MOST_HEAD_WIDTH = 256
# Of cuDNN's attention on all GPUs that it serves; Hopper's takes 256.
_MOST_CUDNN_WIDTH = 128


def prefills_by(
  config: transformer.ModelConfig, dtype: DTypeLike
) -> Literal["cudnn", "kernel"]:
  """What prefills a model with such KV pages.

  Args:
    config: sizes of the model.
    dtype: of the KV pool.
  """
  is_short = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
  serves = is_short and config.head_width <= _MOST_CUDNN_WIDTH
  return "cudnn" if serves else "kernel"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuAttention:
  """Decodes by a kernel that reads the pages in use.

  In decoding, several programs share a sequence. Prefill is cuDNN's, over pages
  that are gathered, where it can serve: it has no attention in float32. There,
  and for wide heads, the kernel prefills too.

  A page holds its keys and its values as [K, O, H], O its positions.
  Source: Flash-Decoding (https://pytorch.org/blog/flash-decoding).

  Attributes:
    mesh: of the generator; each device runs the kernel on its own KV heads.
    prefills_by: "cudnn" or "kernel"; "xla" stands in for cuDNN in tests.
    interpret: whether to simulate the kernel, on whatever devices there are.
  """

  mesh: Mesh
  prefills_by: Literal["cudnn", "kernel", "xla"]
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
    if self.prefills_by == "kernel":
      return self._attend_after(write, self._kernel(), readable_RC, start_R)
    attend = functools.partial(
      gpu_prefill.attend_blocks, implementation=self.prefills_by
    )
    return self._attend_after(write, attend, readable_RC, start_R)

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
    return self._attend_after(write, self._kernel(), page_table_BC, start_B)

  def _kernel(self) -> Callable[..., Array]:
    return functools.partial(gpu_kernel.attend_pages, interpret=self.interpret)

  def _attend_after(
    self,
    write: Callable[..., Array],
    read: Callable[..., Array],
    page_table_BC: Int[Array, "B C"],
    start_B: Int[Array, "B"],
  ) -> attention.Attend:
    """The callback that writes the new keys and values, then attends.

    Each device does so with the KV heads that it has.
    """
    # Queries and pools both have their KV heads in the third place.
    heads, everywhere = PartitionSpec(None, None, "tensor"), PartitionSpec()
    read_heads = jax.shard_map(
      read,
      mesh=self.mesh,
      in_specs=(heads, heads, heads, everywhere, everywhere, everywhere),
      out_specs=heads,
      # Nobody knows what varies over devices within a kernel.
      check_vma=False,
    )

    def attend(query_BTKGH, key_BTKH, value_BTKH, pool, layer):
      pool = kv_pool.KvPool(
        keys=write(pool.keys, key_BTKH, layer),
        values=write(pool.values, value_BTKH, layer),
      )
      out_BTKGH = read_heads(
        query_BTKGH,
        pool.keys,
        pool.values,
        page_table_BC,
        start_B,
        layer[None],
      )
      return out_BTKGH, pool

    return attend


def _is_tile(size: int) -> bool:
  return size >= gpu_kernel.LEAST_TILE and size & (size - 1) == 0
