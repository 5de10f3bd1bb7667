"""What a way to attend within segments has to offer; the loss knows no more."""

from typing import Protocol, runtime_checkable

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


def on_each_device(attend, mesh: Mesh):
  """Runs a kernel on the rows and KV heads that each device has.

  Args:
    attend: of (query_BTKGH, key_BTKH, value_BTKH, segment_ids_BT).
    mesh: of the trainer.
  """
  spec = lambda *names: axes.partition_spec(names, axes.TRAIN)
  kv = spec("row", "token", "kv_head", "head_width")
  query = spec("row", "token", "kv_head", "query_group", "head_width")
  rows: PartitionSpec = spec("row", "token")
  return jax.shard_map(
    attend,
    mesh=mesh,
    in_specs=(query, kv, kv, rows),
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
