"""Attention within segments on GPUs: JAX's Triton kernel."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dora_jax.model import attention, transformer
from dora_jax.trainer.attention import base

_LEAST_TILE, _MOST_HEAD_WIDTH = 16, 128
_BLOCK = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuAttention:
  """FlashAttention in Triton, as JAX ships it, backward pass included.

  cuDNN, by jax.nn.dot_product_attention, is told of segments by a [T, T] mask
  only, and reads it whole; this kernel compares segment ids of two blocks.

  Source: FlashAttention-2 (https://arxiv.org/abs/2307.08691).

  Attributes:
    mesh: of the trainer; each device runs the kernel on its rows and heads.
    interpret: whether to simulate the kernel, on whatever devices there are.
  """

  mesh: Mesh
  interpret: bool = False
  name: str = "gpu"

  def find_obstacle(
    self, config: transformer.ModelConfig, *, row_length: int
  ) -> str | None:
    """Says why the kernel cannot serve such rows, or None."""
    num_shares = self.mesh.shape["sequence"]
    if num_shares != 1:
      return (
        f"config.mesh.trainer_sequence is {num_shares} but must be 1 for the "
        "kernel of GPUs, which takes a row's first query for its first token"
      )
    width = config.head_width
    is_power = width & (width - 1) == 0
    if not is_power or not _LEAST_TILE <= width <= _MOST_HEAD_WIDTH:
      return (
        f"config.model.head_width is {width} but must be a power of two from "
        f"{_LEAST_TILE} to {_MOST_HEAD_WIDTH}"
      )
    if row_length % _BLOCK:
      return (
        f"config.trainer.row_length is {row_length} but must be a multiple of "
        f"{_BLOCK} for the kernel of GPUs"
      )
    return None

  def attend(self, segment_ids_BT: Int[Array, "B T"]) -> attention.Attend:
    """The callback that the model's forward pass takes."""

    def attend(query_BTKGH, key_BTKH, value_BTKH, segment_ids_BT, first):
      del first  # 0: no row is split
      return attend_heads(
        query_BTKGH,
        key_BTKH,
        value_BTKH,
        segment_ids_BT,
        interpret=self.interpret,
      )

    return base.as_callback(
      base.on_each_device(attend, self.mesh), segment_ids_BT
    )


def attend_heads(
  query_BTKGH: Float[Array, "B T K G H"],
  key_BTKH: Float[Array, "B T K H"],
  value_BTKH: Float[Array, "B T K H"],
  segment_ids_BT: Int[Array, "B T"],
  *,
  interpret: bool,
) -> Float[Array, "B T K G H"]:
  """Runs the kernel, which knows no shared key heads, on copies of them."""
  # Only where it serves: jax 0.12 warns of its end to whoever imports it.
  from jax.experimental.pallas.ops.gpu import attention as kernels

  num_rows, num_tokens, num_heads, num_queries, width = query_BTKGH.shape
  heads = (num_rows, num_tokens, num_heads * num_queries, width)
  repeat = lambda x: jnp.repeat(x, num_queries, axis=2)
  out_BTNH: Any = kernels.mha(
    query_BTKGH.reshape(heads),
    repeat(key_BTKH),
    repeat(value_BTKH),
    segment_ids_BT,
    sm_scale=width**-0.5,
    causal=True,
    block_sizes=kernels.BlockSizes(
      block_q=_BLOCK,
      block_k=_BLOCK,
      block_q_dkv=_BLOCK,
      block_kv_dkv=_BLOCK,
      block_q_dq=_BLOCK,
      block_kv_dq=_BLOCK,
    ),
    interpret=interpret,
  )
  # Padding attends to padding, being a segment like any other.
  is_real_BT = (segment_ids_BT != 0)[:, :, None, None, None]
  return jnp.where(is_real_BT, out_BTNH.reshape(query_BTKGH.shape), 0.0)
