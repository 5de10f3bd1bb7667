"""What a way to attend over pages has to offer; the engine knows no more."""

from typing import Protocol, runtime_checkable

from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from dora_jax.generator import kv_pool
from dora_jax.model import attention, transformer

# The obstacle of a kernel that cannot read them.
NO_INT8 = (
  'config.generator.kv_dtype is "int8" but must be "same" for this kernel'
)


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
    self,
    start_R: Int[Array, "R"],
    page_table_RC: Int[Array, "R C"],
    filled_RW: Int[Array, "R W"],
  ) -> attention.Attend:
    """Attention of blocks to all before them, which also fills their pages.

    Args:
      start_R: position of each block's first token, a multiple of its tokens.
      page_table_RC: pages of each block's sequence in order of position, its
        own included; those before it are full, be it by another block of the
        same pass.
      filled_RW: where each page's worth of tokens goes; the trash page where it
        has its KV already. What lies past the end of the sequence is written
        too: nothing reads it before decoding does.

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
