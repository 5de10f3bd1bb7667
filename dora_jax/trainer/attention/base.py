"""What a way to attend within segments has to offer; the loss knows no more."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from dora_jax.model import attention, transformer
from dora_jax.parallel import axes


@runtime_checkable
class SegmentAttention(Protocol):
  """Causal attention within each segment of packed rows, with its gradient.

  Implementations are frozen dataclasses: what is compiled for one is kept under
  it. Each gives what model.attention.segment_attention gives, but for rounding.
  """

  @property
  def name(self) -> str:
    """By which config.trainer.attention chooses it."""
    ...

  def find_obstacle(
    self, config: transformer.ModelConfig, *, row_length: int
  ) -> str | None:
    """Says why it cannot serve such rows, with the field to change.

    Args:
      config: sizes of the model.
      row_length: tokens of a row.

    Returns:
      Part of a sentence; None where it can.
    """
    ...

  def attend(self, segment_ids_BT: Int[Array, "B T"]) -> attention.Attend:
    """The callback that the model's forward pass takes.

    Args:
      segment_ids_BT: 0 is padding; the tokens of a segment stand side by side.
    """
    ...


# What a kernel keeps of its forward pass where keys and values are gathered.
KEPT = "attended"


def on_each_device(attend, mesh: Mesh, more_specs: Sequence[Any] = ()):
  """Runs a kernel on the rows, KV heads and query tokens that each device has.

  A device gathers the keys and values of its rows; of their gradients each gets
  its tokens' sum. Gathered ones live no longer than the pass that needs them:
  of the forward pass stays what the kernel names `KEPT`.

  Tokens are shared out in their order, so that the devices with a row's end
  have more to read than those with its beginning, unless segments are short.

  Source: Llama 3, section 3.3.2 (https://arxiv.org/abs/2407.21783).

  Args:
    attend: of (query_BTKGH, key_BSKH, value_BSKH, segment_ids_BS, first,
      *more); first is the index in its row of the first query's token.
    mesh: of the trainer.
    more_specs: how what else the kernel takes is shared out.

  Returns:
    A function of (query_BTKGH, key_BTKH, value_BTKH, segment_ids_BT, *more).
  """
  spec = lambda *names: axes.partition_spec(names, axes.TRAIN)
  axis: Any = axes.TRAIN.mesh_axis["token"]

  def gather(query_BTKGH, key_BTKH, value_BTKH, segment_ids_BT, *more):
    whole = [
      jax.lax.all_gather(x, axis, axis=1, tiled=True)
      for x in (key_BTKH, value_BTKH, segment_ids_BT)
    ]
    first = jax.lax.axis_index(axis) * query_BTKGH.shape[1]
    return attend(query_BTKGH, *whole, first, *more)

  if mesh.shape[axis] > 1:
    policy = jax.checkpoint_policies.save_only_these_names(KEPT)
    # Forward and backward pass are loops of their own: XLA cannot merge what
    # one of them gathers with what the other does.
    gather = jax.checkpoint(gather, policy=policy, prevent_cse=False)
  kv = spec("row", "token", "kv_head", "head_width")
  query = spec("row", "token", "kv_head", "query_group", "head_width")
  rows: PartitionSpec = spec("row", "token")
  return jax.shard_map(
    gather,
    mesh=mesh,
    in_specs=(query, kv, kv, rows, *more_specs),
    out_specs=query,
    # Nobody knows what varies over devices within a kernel.
    check_vma=False,
  )


def as_callback(attend, segment_ids_BT: Int[Array, "B T"]) -> attention.Attend:
  """What the forward pass calls, of a function of four arrays."""

  def callback(query_BTKGH, key_BTKH, value_BTKH, kv, layer):
    del layer
    return attend(query_BTKGH, key_BTKH, value_BTKH, segment_ids_BT), kv

  return callback
