"""What a way to attend over pages has to offer; the engine knows no more."""

from typing import Protocol, runtime_checkable

from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from dora_jax.generator import kv_pool
from dora_jax.model import attention, transformer


@runtime_checkable
class PagedAttention(Protocol):
  """Attention over the pages of a KV pool, whose layout is its own affair.

  Implementations are frozen dataclasses: what is compiled for one is kept under
  it. Each gives what `xla` gives, but for rounding.
  """

  @property
  def name(self) -> str:
    """By which config.generator.attention chooses it."""
    ...

  def find_obstacle(
    self,
    config: transformer.ModelConfig,
    *,
    page_size: int,
    dtype: DTypeLike,
  ) -> str | None:
    """Says why it cannot serve such a model, with the field to change.

    Args:
      config: sizes of the model.
      page_size: token positions of a page.
      dtype: of the KV pool.

    Returns:
      Part of a sentence; None where it can.
    """
    ...

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
    ...

  def sharding(self, mesh: Mesh) -> NamedSharding:
    """Splits the KV heads over the tensor axis, and nothing else."""
    ...

  def prefill(
    self, segment_ids_BT: Int[Array, "1 T"], page_ids_C: Int[Array, "C"]
  ) -> attention.Attend:
    """Causal attention within one prompt that also fills its pages.

    Args:
      segment_ids_BT: 1 for the prompt, 0 for the padding after it; one row, as
        long as the pages.
      page_ids_C: where each page's worth of tokens goes. What lies past the
        prompt is written too: nothing reads it before decoding overwrites it.

    Returns:
      The callback that the model's forward pass takes as `attend`.
    """
    ...

  def decode(
    self,
    page_table_BC: Int[Array, "B C"],
    position_B: Int[Array, "B"],
    is_active_B: Bool[Array, "B"],
  ) -> attention.Attend:
    """Attention of one new token a slot over the pages of its request.

    Args:
      page_table_BC: the pages of each slot in order of position.
      position_B: position of the new token; it sees itself and all before it.
      is_active_B: whether the slot has a request; if not it writes to page 0.

    Returns:
      The callback that the model's forward pass takes as `attend`.
    """
    ...
