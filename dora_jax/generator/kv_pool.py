"""The KV pool on a mesh: its pages, and what can be done with whole pages."""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from dora_jax.generator import pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KvPool:
  """Keys and values of all live requests of a mesh, in pages.

  Arrays are [layers, pages, ...]. How a page is laid out, and in how many
  arrays, is up to the attention that reads and writes it, see `attention.base`;
  all else takes whole pages. The pages of one request, taken out of a pool,
  have the same form.

  Attributes:
    keys: after rotary embedding; a pytree of arrays.
    values: as they are; None where `keys` holds both.
  """

  keys: Any
  values: Any

  @property
  def num_pages(self) -> int:
    """Pages, of each layer."""
    return jax.tree.leaves(self)[0].shape[1]

  @property
  def page_format(self) -> tuple[tuple[Any, ...], ...]:
    """Layers, shape of a page and dtype of each array."""
    return tuple(
      (kv.shape[0], *kv.shape[2:], np.dtype(kv.dtype).name)
      for kv in jax.tree.leaves(self)
    )


@dataclasses.dataclass(kw_only=True)
class SharedPool:
  """The one KV pool of a mesh, which its lanes hand to each other.

  Attributes:
    kv: the pages themselves; replaced by each verb, which consumes it.
    allocator: who holds which page.
    page_size: token positions of a page.
    num_serving: version -> lanes that serve it.
  """

  kv: KvPool
  allocator: pages.PageAllocator
  page_size: int
  num_serving: collections.Counter[int] = dataclasses.field(
    default_factory=collections.Counter
  )

  def serve(self, version: int) -> None:
    """A lane serves this version from now on."""
    self.num_serving[version] += 1

  def unserve(self, version: int) -> None:
    """A lane serves it no more; after the last, nothing of it is found."""
    self.num_serving[version] -= 1
    if not self.num_serving[version]:
      del self.num_serving[version]
      self.allocator.drop(version)


def page_at(
  page_table_BC: Int[Array, "B C"],
  column_B: Int[Array, "B"],
  is_active_B: Bool[Array, "B"],
) -> Int[Array, "B"]:
  """Where each slot writes: its page in this column, or else the trash page."""
  page_B1 = jnp.take_along_axis(page_table_BC, column_B[:, None], axis=1)
  return jnp.where(is_active_B, page_B1[:, 0], pages.TRASH_PAGE)


def copy_pages(
  pool: KvPool, copies_B2: Int[Array, "B 2"], num_copies: Int[Array, ""]
) -> KvPool:
  """Copies the pages of the first num_copies rows, all layers of each."""

  def copy(row, pool):
    source, target = copies_B2[row]
    return jax.tree.map(lambda kv: kv.at[:, target].set(kv[:, source]), pool)

  return jax.lax.fori_loop(0, num_copies, copy, pool)


def read_pages(pool: KvPool, page_ids_C: Int[Array, "C"]) -> KvPool:
  """The KV of some pages, all layers of each, in the order asked for."""
  return jax.tree.map(lambda kv: kv[:, page_ids_C], pool)


def write_pages(
  pool: KvPool, carried: KvPool, page_ids_C: Int[Array, "C"]
) -> KvPool:
  """Puts what `read_pages` gave into these pages; the trash page may repeat."""
  return jax.tree.map(
    lambda kv, pages_of: kv.at[:, page_ids_C].set(pages_of), pool, carried
  )


def without_trash(page_table_RC: Int[Array, "R C"]) -> Int[Array, "R C"]:
  """The same pages, each row's first one in place of the trash page.

  No token sees what lies past its sequence, but a NaN there would pass through
  a weight of 0: the trash page may hold any, the first page none.
  """
  is_trash_RC = page_table_RC == pages.TRASH_PAGE
  return jnp.where(is_trash_RC, page_table_RC[:, :1], page_table_RC)
