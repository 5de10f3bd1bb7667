"""Attention over pages on GPUs: decode by a Triton kernel, prefill by cuDNN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dora_jax.generator import kv_pool, pages
from dora_jax.model import attention, transformer

# The least rows and columns that a tensor core multiplies.
_LEAST_TILE = 16
_MOST_HEAD_WIDTH = 256
# Programs that share a sequence. With more, few slots still fill the device,
# and long requests take no longer than short ones; with fewer, less is summed.
_NUM_SPLITS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuAttention:
  """Decodes by a kernel that reads the pages in use, in parts of a sequence.

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
    del dtype
    width = config.head_width
    if not _is_tile(width) or width > _MOST_HEAD_WIDTH:
      return (
        f"config.model.head_width is {width} but must be a power of two from "
        f"{_LEAST_TILE} to {_MOST_HEAD_WIDTH}"
      )
    if not _is_tile(page_size):
      return (
        f"config.generator.page_size is {page_size} but must be a power of two "
        f"of at least {_LEAST_TILE}"
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
    self, segment_ids_BT: Int[Array, "1 T"], page_ids_C: Int[Array, "C"]
  ) -> attention.Attend:
    """Causal attention within one prompt that also fills its pages."""
    num_pages = page_ids_C.shape[0]
    attend_dense = attention.segment_attention(segment_ids_BT)

    def write(pages_LJKOH, rows_BTKH, layer):
      _, num_tokens, num_heads, width = rows_BTKH.shape
      page = (num_pages, num_tokens // num_pages, num_heads, width)
      rows_CKOH = rows_BTKH.reshape(page).swapaxes(1, 2)
      rows_CKOH = rows_CKOH.astype(pages_LJKOH.dtype)
      return pages_LJKOH.at[layer, page_ids_C].set(rows_CKOH)

    def attend(query_BTKGH, key_BTKH, value_BTKH, pool, layer):
      pool = kv_pool.KvPool(
        keys=write(pool.keys, key_BTKH, layer),
        values=write(pool.values, value_BTKH, layer),
      )
      if self._has_cudnn(query_BTKGH):
        # Padding comes last: no real token sees it.
        out_BTKGH = self._attend_by_cudnn(query_BTKGH, key_BTKH, value_BTKH)
        return out_BTKGH, pool
      out_BTKGH, _ = attend_dense(
        query_BTKGH, key_BTKH, value_BTKH, None, layer
      )
      return out_BTKGH, pool

    return attend

  def decode(
    self,
    page_table_BC: Int[Array, "B C"],
    position_B: Int[Array, "B"],
    is_active_B: Bool[Array, "B"],
  ) -> attention.Attend:
    """Attention of one new token a slot over the pages of its request."""
    length_B = jnp.where(is_active_B, position_B + 1, 1)

    def write(pages_LJKOH, rows_BTKH, layer):
      page_size = pages_LJKOH.shape[3]
      column_B1 = position_B[:, None] // page_size
      page_B = jnp.take_along_axis(page_table_BC, column_B1, axis=1)[:, 0]
      page_B = jnp.where(is_active_B, page_B, pages.TRASH_PAGE)
      rows_BKH = rows_BTKH[:, 0].astype(pages_LJKOH.dtype)
      offset_B = position_B % page_size
      return pages_LJKOH.at[layer, page_B, :, offset_B].set(rows_BKH)

    def attend(query_BTKGH, key_BTKH, value_BTKH, pool, layer):
      pool = kv_pool.KvPool(
        keys=write(pool.keys, key_BTKH, layer),
        values=write(pool.values, value_BTKH, layer),
      )
      out_BKGH = self._run_kernel(
        query_BTKGH[:, 0], pool, page_table_BC, length_B, layer
      )
      return out_BKGH[:, None], pool

    return attend

  def _has_cudnn(self, query_BTKGH: Array) -> bool:
    """Whether cuDNN has attention for these; it has none of fp32."""
    is_half = query_BTKGH.dtype == jnp.bfloat16
    return is_half and query_BTKGH.shape[-1] <= 128 and not self.interpret

  def _attend_by_cudnn(
    self,
    query_BTKGH: Float[Array, "B T K G H"],
    key_BTKH: Float[Array, "B T K H"],
    value_BTKH: Float[Array, "B T K H"],
  ) -> Float[Array, "B T K G H"]:
    """Causal attention on each device, on the KV heads that it has."""

    def attend_local(query_BTKGH, key_BTKH, value_BTKH):
      num_rows, num_tokens, _, _, width = query_BTKGH.shape
      out_BTNH = jax.nn.dot_product_attention(
        query_BTKGH.reshape(num_rows, num_tokens, -1, width),
        key_BTKH,
        value_BTKH,
        is_causal=True,
        implementation="cudnn",
      )
      return out_BTNH.reshape(query_BTKGH.shape)

    heads = PartitionSpec(None, None, "tensor")
    return jax.shard_map(
      attend_local,
      mesh=self.mesh,
      in_specs=(heads, heads, heads),
      out_specs=heads,
      check_vma=False,
    )(query_BTKGH, key_BTKH, value_BTKH)

  def _run_kernel(
    self,
    query_BKGH: Float[Array, "B K G H"],
    pool: kv_pool.KvPool,
    page_table_BC: Int[Array, "B C"],
    length_B: Int[Array, "B"],
    layer: Int[Array, ""],
  ) -> Float[Array, "B K G H"]:
    """Runs the kernel on each device, on the KV heads that it has."""
    everywhere, heads = PartitionSpec(), PartitionSpec(None, "tensor")
    paged = self.sharding(self.mesh).spec
    return jax.shard_map(
      functools.partial(_attend_pages, interpret=self.interpret),
      mesh=self.mesh,
      in_specs=(heads, paged, paged, everywhere, everywhere, everywhere),
      out_specs=heads,
      # Nobody knows what varies over devices within the kernel.
      check_vma=False,
    )(query_BKGH, pool.keys, pool.values, page_table_BC, length_B, layer[None])


def _is_tile(size: int) -> bool:
  return size >= _LEAST_TILE and size & (size - 1) == 0


def _attend_pages(
  query_BKGH: Float[Array, "B K G H"],
  key_LJKOH: Float[Array, "L J K O H"],
  value_LJKOH: Float[Array, "L J K O H"],
  page_table_BC: Int[Array, "B C"],
  length_B: Int[Array, "B"],
  layer_1: Int[Array, "1"],
  *,
  interpret: bool,
) -> Float[Array, "B K G H"]:
  """Softmax attention of each slot over its first positions, on one device.

  Each program gives the maximum m, sum and weighted sum of its part Z of a
  sequence, all fp32; here they are scaled by exp(m - max(m)) and added up.
  """
  num_slots, num_heads, num_queries, width = query_BKGH.shape
  tile_rows = max(1 << (num_queries - 1).bit_length(), _LEAST_TILE)
  padding = [(0, 0), (0, 0), (0, tile_rows - num_queries), (0, 0)]
  grid = (num_slots, num_heads, _NUM_SPLITS)
  sums = lambda *sizes: (
    jax.ShapeDtypeStruct((*grid, tile_rows, *sizes), jnp.float32),
    pl.BlockSpec(
      (None, None, None, tile_rows, *sizes),
      lambda slot, head, split: (slot, head, split, 0, *(0 for _ in sizes)),
    ),
  )
  max_shape, max_block = sums()
  out_shape, out_block = sums(width)
  max_BKZG, total_BKZG, out_BKZGH = pl.pallas_call(
    _attend_part,
    grid=grid,
    in_specs=[
      pl.BlockSpec(
        (None, None, tile_rows, width),
        lambda slot, head, split: (slot, head, 0, 0),
      ),
      *(pl.BlockSpec() for _ in range(5)),
    ],
    out_specs=(max_block, max_block, out_block),
    out_shape=(max_shape, max_shape, out_shape),
    compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
    name="paged_decode",
  )(
    jnp.pad(query_BKGH, padding).astype(key_LJKOH.dtype),
    key_LJKOH,
    value_LJKOH,
    page_table_BC,
    length_B,
    layer_1,
  )
  scale_BKZG = jnp.exp(max_BKZG - max_BKZG.max(axis=2, keepdims=True))
  total_BKG = (total_BKZG * scale_BKZG).sum(axis=2)
  out_BKGH = (out_BKZGH * scale_BKZG[..., None]).sum(axis=2)
  out_BKGH = (out_BKGH / total_BKG[..., None])[:, :, :num_queries]
  return out_BKGH.astype(query_BKGH.dtype)


def _attend_part(
  query_ref,  # [G, H], of this slot and KV head
  key_ref,  # [L, J, K, O, H]
  value_ref,  # [L, J, K, O, H]
  table_ref,  # [B, C]
  length_ref,  # [B]
  layer_ref,  # [1]
  max_ref,  # [G], of this slot, KV head and part
  total_ref,  # [G]
  out_ref,  # [G, H]
):
  """One program: the pages of one part of a sequence, one after the other."""
  slot, head, split = (pl.program_id(axis) for axis in range(3))
  page_size = key_ref.shape[3]
  length, layer = length_ref[slot], layer_ref[0]
  num_columns = pl.cdiv(length, page_size)
  part_columns = pl.cdiv(num_columns, _NUM_SPLITS)
  first = split * part_columns
  query_GH = query_ref[...]
  num_queries, width = query_GH.shape

  def attend_page(column, sums):
    max_G, total_G, out_GH = sums
    page = table_ref[slot, column]
    key_OH = key_ref[layer, page, head]
    value_OH = value_ref[layer, page, head]
    position_O = column * page_size + jnp.arange(page_size)
    scores_GO = _dot(query_GH, key_OH, contracting=1) * width**-0.5
    seen_1O = (position_O < length)[None]
    scores_GO = jnp.where(seen_1O, scores_GO, -jnp.inf)
    # What a former request left there may be NaN, which 0 * NaN would let pass.
    seen_O1 = (position_O < length)[:, None]
    value_OH = jnp.where(seen_O1, value_OH, jnp.zeros_like(value_OH))
    new_max_G = jnp.maximum(max_G, scores_GO.max(axis=1))
    scale_G = jnp.exp(max_G - new_max_G)
    weights_GO = jnp.exp(scores_GO - new_max_G[:, None])
    add_GH = _dot(weights_GO.astype(value_OH.dtype), value_OH, contracting=0)
    return (
      new_max_G,
      total_G * scale_G + weights_GO.sum(axis=1),
      out_GH * scale_G[:, None] + add_GH,
    )

  # The first position of each page that is read is seen: so all maxima are
  # finite from the first page on. A part without pages weighs exp(-inf).
  start = (
    jnp.full((num_queries,), -jnp.inf, jnp.float32),
    jnp.zeros((num_queries,), jnp.float32),
    jnp.zeros((num_queries, width), jnp.float32),
  )
  last = jnp.minimum(first + part_columns, num_columns)
  max_G, total_G, out_GH = jax.lax.fori_loop(first, last, attend_page, start)
  max_ref[...] = max_G
  total_ref[...] = total_G
  out_ref[...] = out_GH


def _dot(left: Array, right: Array, *, contracting: int) -> Array:
  """Product over left's last axis, exact for fp32: no TF32."""
  return jax.lax.dot_general(
    left,
    right,
    (((1,), (contracting,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )
