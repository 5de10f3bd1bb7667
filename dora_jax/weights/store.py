"""Which versions live, who holds them, and where their copies are.

A version lives while anybody holds it; it is freed when the last holder lets
go, and never before. A holder reserves first and is served later, so that the
version cannot go in between.
"""

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

import jax

from dora_jax.weights import reshard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Publication:
  """What the trainer's side knows of a version that it has published.

  Attributes:
    version: the version.
    checksums: one number for each array.
    num_bytes: of one whole copy.
    num_changed: arrays that differ from the version published before.
  """

  version: int
  checksums: dict[str, int]
  num_bytes: int
  num_changed: int


@dataclasses.dataclass(kw_only=True)
class _Version:
  publication: Publication
  # The trainer's copy; dropped when a newer version is there and every holder
  # has been served.
  source: Any
  # holder -> the mesh on which it wants its copy; None wants none.
  holders: dict[str, int | None]
  copies: dict[int, Any]


class WeightStore:
  """Versions of the params by reference count.

  Several threads may call it; what moves bytes runs outside of its lock.
  """

  def __init__(self, *, shardings: Mapping[int, Any], dtype: Any):
    """Prepares an empty store.

    Args:
      shardings: generator mesh -> the params' shardings on it.
      dtype: what generators compute in; published params are cast to it.
    """
    self._shardings = dict(shardings)
    self._dtype = dtype
    self._lock = threading.Lock()
    self._versions: dict[int, _Version] = {}
    self._newest: int | None = None
    self._newest_checksums: dict[str, int] = {}

  def publish(self, version: int, params: Any, *, holder: str) -> Publication:
    """Makes a version available; the caller's params stay his own.

    Args:
      version: newer than any before.
      params: as the trainer holds them; cast and copied on its mesh.
      holder: who keeps the version alive until it calls `release`.
    """
    source = reshard.cast(params, dtype=self._dtype)
    checksums = reshard.checksums(source)
    with self._lock:
      if self._newest is not None and version <= self._newest:
        raise ValueError(
          f"Version {version} is published after version {self._newest}."
        )
      before = self._newest_checksums
      publication = Publication(
        version=version,
        checksums=checksums,
        num_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(source)),
        num_changed=sum(
          before.get(name) != checksum for name, checksum in checksums.items()
        ),
      )
      self._versions[version] = _Version(
        publication=publication,
        source=source,
        holders={holder: None},
        copies={},
      )
      self._newest, self._newest_checksums = version, checksums
      for older in self._versions.values():
        self._drop_source_if_served(older)
    return publication

  def reserve(self, version: int, *, holder: str, mesh_id: int) -> None:
    """Keeps a version alive for a holder, who will call `place` for it."""
    with self._lock:
      entry = self._entry(version)
      if holder in entry.holders:
        raise ValueError(f"{holder} holds version {version} already.")
      entry.holders[holder] = mesh_id

  def place(self, version: int, *, holder: str) -> Any:
    """The version's params on the holder's mesh, checked by their checksums.

    Only the thread that drives a mesh may place on it: two programs that span
    its devices must not be enqueued in different orders.

    Raises:
      ValueError: the holder has not reserved the version, or the copy's
        checksums are not those of the trainer's side.
    """
    with self._lock:
      entry = self._entry(version)
      mesh_id = entry.holders.get(holder)
      if mesh_id is None:
        raise ValueError(f"{holder} has not reserved version {version}.")
      params = entry.copies.get(mesh_id)
      origin = entry.source
      if origin is None:
        origin = next(iter(entry.copies.values()))
    if params is None:
      params = reshard.reshard(origin, self._shardings[mesh_id])
      reshard.check_equal(
        entry.publication.checksums, reshard.checksums(params)
      )
    with self._lock:
      entry.copies[mesh_id] = params
      self._drop_source_if_served(entry)
    return params

  def release(self, version: int, *, holder: str) -> None:
    """Lets go of a version; frees what nobody holds any more."""
    with self._lock:
      entry = self._entry(version)
      if holder not in entry.holders:
        raise ValueError(
          f"{holder} lets go of version {version}, which it does not hold."
        )
      mesh_id = entry.holders.pop(holder)
      # The last copy of a version that somebody holds has to stay somewhere.
      is_last = entry.source is None and len(entry.copies) == 1
      if (
        mesh_id is not None
        and mesh_id not in entry.holders.values()
        and not is_last
      ):
        entry.copies.pop(mesh_id, None)
      if not entry.holders:
        del self._versions[version]
      else:
        self._drop_source_if_served(entry)

  def versions(self) -> list[int]:
    """The versions that live, oldest first."""
    with self._lock:
      return sorted(self._versions)

  def _entry(self, version: int) -> _Version:
    if version not in self._versions:
      raise ValueError(
        f"Version {version} is not in the store, which holds "
        f"{sorted(self._versions)}."
      )
    return self._versions[version]

  def _drop_source_if_served(self, entry: _Version) -> None:
    """Frees the trainer's copy once only generators can want the version."""
    wanted = {mesh for mesh in entry.holders.values() if mesh is not None}
    if (
      entry.publication.version != self._newest
      and entry.copies
      and wanted <= entry.copies.keys()
    ):
      entry.source = None
