"""Attention within segments on TPUs: JAX's splash attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from dora_jax.model import attention, transformer
from dora_jax.trainer.attention import base

# Registers are 128 lanes wide.
_LANES = 128
_MOST_BLOCK = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuAttention:
  """Splash attention: blocks above the diagonal are never visited.

  Source: FlashAttention (https://arxiv.org/abs/2205.14135); the kernel is the
  one that JAX ships, for one key head and its queries.

  Attributes:
    mesh: of the trainer; each device runs the kernel on its rows and heads, of
      the queries on its tokens.
    interpret: whether to simulate the kernel, on whatever devices there are.
  """

  mesh: Mesh
  interpret: bool = False
  name: str = "tpu"

  def find_obstacle(
    self, config: transformer.ModelConfig, *, row_length: int
  ) -> str | None:
    """Says why the kernel cannot serve such rows, or None."""
    del config
    num_shares = self.mesh.shape["sequence"]
    if row_length % (_LANES * num_shares):
      return (
        f"config.trainer.row_length is {row_length} but must be a multiple of "
        f"{_LANES} times config.mesh.trainer_sequence, {num_shares}, for "
        "splash attention"
      )
    return None

  def attend(self, segment_ids_BT: Int[Array, "B T"]) -> attention.Attend:
    """The callback that the model's forward pass takes."""

    def attend(query_BTKGH, *others):
      _, num_tokens, _, num_queries, _ = query_BTKGH.shape
      num_shares = self.mesh.shape["sequence"]
      kernel = _make_kernel(num_queries, num_tokens, num_shares, self.interpret)
      # The mask of each share of the queries is its own.
      by_share = NamedSharding(self.mesh, PartitionSpec(None, "sequence"))
      spec = kernel.manual_sharding_spec(by_share)
      run = base.on_each_device(_attend, self.mesh, more_specs=(spec,))
      return run(query_BTKGH, *others, kernel)

    return base.as_callback(attend, segment_ids_BT)


def _attend(
  query_BTKGH: Float[Array, "B T K G H"],
  key_BSKH: Float[Array, "B S K H"],
  value_BSKH: Float[Array, "B S K H"],
  segment_ids_BS: Int[Array, "B S"],
  first: Int[Array, ""],
  kernel: kernels.SplashAttentionKernel,
) -> Float[Array, "B T K G H"]:
  """Runs the kernel on each row and each key head."""
  _, num_tokens, _, _, width = query_BTKGH.shape
  segment_ids_BT = jax.lax.dynamic_slice_in_dim(
    segment_ids_BS, first, num_tokens, axis=1
  )
  # It reads whole lanes; zeros add nothing to a score.
  pad = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -width % _LANES)])
  query_BKGTH = jnp.moveaxis(pad(query_BTKGH * width**-0.5), 1, 3)
  key_BKSH, value_BKSH = (
    jnp.moveaxis(pad(x), 1, 2) for x in (key_BSKH, value_BSKH)
  )
  of_heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))
  ids = kernels.SegmentIds(q=segment_ids_BT, kv=segment_ids_BS)
  out_BKGTH: Any = jax.vmap(of_heads)(query_BKGTH, key_BKSH, value_BKSH, ids)
  out_BTKGH = jnp.moveaxis(out_BKGTH, 3, 1)[..., :width]
  # Padding attends to padding, being a segment like any other.
  is_real_BT = (segment_ids_BT != 0)[:, :, None, None, None]
  return jnp.where(is_real_BT, out_BTKGH, 0.0).astype(query_BTKGH.dtype)


def _make_kernel(
  num_queries: int, num_tokens: int, num_shares: int, interpret: bool
) -> kernels.SplashAttentionKernel:
  """Attention of the queries of one key head, in one row.

  Args:
    num_queries: heads of them.
    num_tokens: of the row.
    num_shares: devices among which the queries' tokens are shared out.
    interpret: see TpuAttention.
  """
  block = next(
    size
    for size in (_MOST_BLOCK, _MOST_BLOCK // 2, _LANES)
    if num_tokens % (size * num_shares) == 0
  )
  causal = masks.CausalMask((num_tokens, num_tokens))
  return kernels.make_splash_mqa(
    masks.MultiHeadMask([causal] * num_queries),
    head_shards=1,
    q_seq_shards=num_shares,
    residual_checkpoint_name=base.KEPT,
    block_sizes=kernels.BlockSizes(
      block_q=block,
      block_kv=block,
      block_kv_compute=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_kv_dkv_compute=block,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    interpret=interpret,
  )
