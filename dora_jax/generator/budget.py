"""How many pages the KV pool of a mesh gets where the config does not say."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dora_jax.generator.attention import base
from dora_jax.model import transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """What there is for the params and the KV pool of one mesh.

  Attributes:
    free_bytes: on each of its devices.
    source: where the number is from, for the log.
  """

  free_bytes: int
  source: str


def page_bytes(
  paged: base.PagedAttention,
  config: transformer.ModelConfig,
  *,
  mesh: Mesh,
  page_size: int,
  dtype: DTypeLike,
) -> int:
  """Bytes that a page takes on each device of a mesh, in all layers."""
  pool = jax.eval_shape(
    lambda: paged.create_pool(
      config, mesh=mesh, num_pages=1, page_size=page_size, dtype=dtype
    )
  )
  sizes = [kv.size * kv.dtype.itemsize for kv in jax.tree.leaves(pool)]
  return sum(sizes) // mesh.size


def measure_memory(meshes: Sequence[Sequence[Any]], index: int) -> Memory:
  """Asks the devices of a mesh what they have left, a CPU what its host has.

  Meshes that share a device, as those of one host's CPU all do, get equal parts
  of it.

  Args:
    meshes: the jax.Devices of each generator mesh, before any has its pool.
    index: the one to measure for.
  """
  devices = meshes[index]
  stats = [device.memory_stats() for device in devices]
  if all(stats):
    left = min(s["bytes_limit"] - s["bytes_in_use"] for s in stats if s)
    num_sharing = sum(devices[0] in mesh for mesh in meshes)
    source = f"left on {devices[0]}"
  else:
    left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_sharing = sum(len(mesh) for mesh in meshes)
    source = "of memory that the host has"
  return Memory(
    free_bytes=left // num_sharing,
    source=f"(a part of {num_sharing}) {source}",
  )


def choose_num_pages(
  *,
  memory: Memory,
  share: float,
  reserved_bytes: int,
  bytes_a_page: int,
  pages_a_slot: int,
  num_slots: int,
) -> int:
  """Pages for every slot to reach its limit at once, or what there is room for.

  Args:
    memory: what a device has left.
    share: of what is left after `reserved_bytes` that the pool may take.
    reserved_bytes: that other things will take of it: params of the versions
      that the mesh is to hold, and what training needs on shared devices.
    bytes_a_page: on each device.
    pages_a_slot: of a request that runs to the greatest length.
    num_slots: of all lanes of the mesh.

  Returns:
    Pages, the trash page included.

  Raises:
    ValueError: there is no room for one request of the greatest length.
  """
  wanted = 1 + num_slots * pages_a_slot
  left_bytes = max(memory.free_bytes - reserved_bytes, 0)
  affordable = int(share * left_bytes) // bytes_a_page
  numbers = (
    f"{_gib(memory.free_bytes)} {memory.source}, {_gib(reserved_bytes)} of it "
    f"reserved for params; a share of {share:g} of the rest holds {affordable} "
    f"pages of {bytes_a_page} bytes"
  )
  if affordable < 1 + pages_a_slot:
    raise ValueError(
      f"One request of the greatest length and the trash page need "
      f"{1 + pages_a_slot} pages, but there is no room: {numbers}. Lower "
      "config.generator.max_length or config.mesh.lanes, raise "
      "config.mesh.generator_tensor or config.generator.memory_share, or set "
      "config.generator.num_pages."
    )
  chosen = min(wanted, affordable)
  logging.info(
    "KV pool: %d pages, where %d slots at their limit need %d: %s.",
    chosen,
    num_slots,
    wanted,
    numbers,
  )
  return chosen


def _gib(num_bytes: int) -> str:
  return f"{num_bytes / 2**30:.2f} GiB"
