"""Which versions live, who holds them, and where their copies are.

A version lives while anybody holds it; it is freed when the last holder lets
go, and never before. A holder reserves first and is served later, so that the
version cannot go in between. It is served from the nearest copy; a mesh keeps
one while a holder wants it there, and the last of all goes to host memory.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from absl import logging

from dora_jax.weights import delivery, origins, reshard


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
  """A version that lives; it always has a copy somewhere.

  Attributes:
    publication: what was published.
    source: the trainer's copy; None once a newer version is there, every
      holder has been served and another copy exists.
    holders: holder -> the mesh on which it wants its copy; None wants none.
    copies: mesh -> the copy on it.
    host: the copy in host memory, made when it was to be the only one.
  """

  publication: Publication
  source: Any
  holders: dict[str, int | None]
  copies: dict[int, Any] = dataclasses.field(default_factory=dict)
  host: Any = None

  def wanted(self) -> set[int]:
    """Meshes on which somebody wants the version."""
    return {mesh for mesh in self.holders.values() if mesh is not None}

  def has_other_than(self, copy: Any) -> bool:
    """Whether the version would still be somewhere without this copy."""
    everywhere = (self.source, self.host, *self.copies.values())
    return any(c is not None and c is not copy for c in everywhere)

  def must_spill(self, mesh_id: int) -> bool:
    """Whether holders' only copy is on a mesh where none of them wants it."""
    return (
      bool(self.holders)
      and mesh_id in self.copies
      and mesh_id not in self.wanted()
      and not self.has_other_than(self.copies[mesh_id])
    )


class WeightStore:
  """Versions of the params by reference count.

  Several threads may call it; what moves bytes runs outside of its lock.
  """

  def __init__(
    self,
    *,
    shardings: Mapping[int, Any],
    dtype: Any,
    convert: Callable[[Any], Any] = lambda params: params,
  ):
    """Prepares an empty store.

    Args:
      shardings: generator mesh -> the params' shardings on it.
      dtype: what generators compute in; published params are cast to it.
      convert: gives cast params the form that generators take; on the trainer's
        mesh, so that fewer bytes move where it has fewer.
    """
    self._shardings = dict(shardings)
    self._dtype = dtype
    self._convert = convert
    self._lock = threading.Lock()
    self._versions: dict[int, _Version] = {}
    self._newest: int | None = None
    self._newest_checksums: dict[str, int] = {}
    self._copied_from: collections.Counter[str] = collections.Counter()
    self._num_retried = 0

  def publish(self, version: int, params: Any, *, holder: str) -> Publication:
    """Makes a version available; the caller's params stay his own.

    Args:
      version: newer than any before.
      params: as the trainer holds them; cast and copied on its mesh.
      holder: who keeps the version alive until it calls `release`.
    """
    source = self._convert(reshard.cast(params, dtype=self._dtype))
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
      )
      self._newest, self._newest_checksums = version, checksums
      for older in self._versions.values():
        self._drop_unwanted(older)
    return publication

  def copy_of(self, version: int) -> tuple[Publication, Any]:
    """Some copy of a version that lives, wherever it is; to be read only."""
    with self._lock:
      entry = self._entry(version)
      # The last is the host's or the trainer's, if one has a copy: generators
      # have other things to do.
      return entry.publication, self._origins(entry)[-1].params

  def readmit(
    self,
    version: int,
    params: Any,
    *,
    checksums: Mapping[str, int],
    holder: str,
  ) -> None:
    """Makes a version available that an earlier process had published.

    Args:
      version: older than any that is published here.
      params: in host memory, in the form that generators take.
      checksums: of its publication, by which each copy will be checked.
      holder: who keeps the version alive until it calls `release`.
    """
    publication = Publication(
      version=version,
      checksums=dict(checksums),
      num_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
      num_changed=len(checksums),
    )
    with self._lock:
      self._versions[version] = _Version(
        publication=publication,
        source=None,
        holders={holder: None},
        host=params,
      )

  def published_form(self, params: Any) -> Any:
    """Shapes and dtypes of what `publish` makes of these params."""
    return jax.eval_shape(
      lambda params: self._convert(reshard.cast(params, dtype=self._dtype)),
      params,
    )

  def reserve(self, version: int, *, holder: str, mesh_id: int) -> None:
    """Keeps a version alive for a holder, who will call `place` for it."""
    with self._lock:
      entry = self._entry(version)
      if holder in entry.holders:
        raise ValueError(f"{holder} holds version {version} already.")
      entry.holders[holder] = mesh_id

  def place(self, version: int, *, holder: str) -> Any:
    """The version's params on the holder's mesh, checked by their checksums.

    Taken from the copy that `origins.nearest` picks, which may be let go of
    meanwhile: it is only read, nobody donates published params, and it stays
    in memory until it has been read.

    Only the thread that drives a mesh may place on it: two programs that span
    its devices must not be enqueued in different orders.

    Raises:
      ValueError: the holder has not reserved the version, or twice the copy's
        checksums were not those of the trainer's side.
    """
    with self._lock:
      entry = self._entry(version)
      mesh_id = entry.holders.get(holder)
      if mesh_id is None:
        raise ValueError(f"{holder} has not reserved version {version}.")
      if mesh_id in entry.copies:
        return entry.copies[mesh_id]
      candidates = self._origins(entry)
    made = delivery.deliver(
      f"Version {version}",
      candidates,
      self._shardings[mesh_id],
      checksums=entry.publication.checksums,
    )
    with self._lock:
      entry.copies[mesh_id] = made.params
      self._copied_from[made.origin.kind] += 1
      self._num_retried += made.num_failed
      self._drop_unwanted(entry)
    return made.params

  def release(self, version: int, *, holder: str) -> None:
    """Lets go of a version; frees what nobody holds any more.

    Where others hold the version and its last copy was this holder's, the call
    lasts until that copy is in host memory.
    """
    with self._lock:
      entry = self._entry(version)
      if holder not in entry.holders:
        raise ValueError(
          f"{holder} lets go of version {version}, which it does not hold."
        )
      mesh_id = entry.holders.pop(holder)
      if not entry.holders:
        del self._versions[version]
        return
      self._drop_unwanted(entry)
      if mesh_id is None or not entry.must_spill(mesh_id):
        return
      last = entry.copies[mesh_id]
    self._spill(entry, mesh_id, last)

  def lose(self, mesh_id: int, holders: Collection[str]) -> list[int]:
    """Lets go of a mesh that has failed, for all that hold versions there.

    A copy that is a version's last is read to host memory, if it still can be.

    Args:
      mesh_id: whose copies nobody may take any more.
      holders: all that were served there; they hold nothing from now on.

    Returns:
      Versions that others hold and that are gone, as there is no copy left.
    """
    lost = []
    with self._lock:
      for version, entry in list(self._versions.items()):
        for holder in holders:
          entry.holders.pop(holder, None)
        copy = entry.copies.pop(mesh_id, None)
        if not entry.holders:
          del self._versions[version]
        elif copy is not None and not entry.has_other_than(copy):
          entry.host = _rescue(copy)
          if entry.host is None:
            del self._versions[version]
            lost.append(version)
    return lost

  def versions(self) -> list[int]:
    """The versions that live, oldest first."""
    with self._lock:
      return sorted(self._versions)

  @property
  def host_bytes(self) -> int:
    """Bytes of host memory that versions hold."""
    with self._lock:
      return sum(
        entry.publication.num_bytes
        for entry in self._versions.values()
        if entry.host is not None
      )

  @property
  def copied_from(self) -> collections.Counter[str]:
    """Copies placed so far, by the kind of copy that each was taken from."""
    with self._lock:
      return self._copied_from.copy()

  @property
  def num_retried(self) -> int:
    """Copies that arrived only when they were sent again."""
    with self._lock:
      return self._num_retried

  def _entry(self, version: int) -> _Version:
    if version not in self._versions:
      raise ValueError(
        f"Version {version} is not in the store, which holds "
        f"{sorted(self._versions)}."
      )
    return self._versions[version]

  def _drop_unwanted(self, entry: _Version) -> None:
    """Frees device copies that no holder wants, except a version's last."""
    wanted = entry.wanted()
    for mesh_id in entry.copies.keys() - wanted:
      if entry.has_other_than(entry.copies[mesh_id]):
        del entry.copies[mesh_id]
    if (
      entry.publication.version != self._newest
      and wanted <= entry.copies.keys()
      and entry.has_other_than(entry.source)
    ):
      entry.source = None

  def _spill(self, entry: _Version, mesh_id: int, last: Any) -> None:
    """Copies a version's last copy to the host, and only then frees it.

    Gives up as soon as there is no need: another copy has been placed, somebody
    wants this one after all, or nobody holds the version any more.
    """
    leaves, structure = jax.tree.flatten(last)
    host = []
    for leaf in leaves:
      with self._lock:
        if not entry.must_spill(mesh_id):
          return
      host.append(reshard.to_host(leaf))
    with self._lock:
      if entry.must_spill(mesh_id):
        entry.host = jax.tree.unflatten(structure, host)
        self._drop_unwanted(entry)

  def _origins(self, entry: _Version) -> list[origins.Origin]:
    found = [
      origins.Origin(
        kind="peer",
        devices=delivery.devices_of(self._shardings[mesh_id]),
        params=copy,
      )
      for mesh_id, copy in entry.copies.items()
    ]
    if entry.source is not None:
      devices = delivery.devices_of(
        [x.sharding for x in jax.tree.leaves(entry.source)]
      )
      found.append(
        origins.Origin(kind="trainer", devices=devices, params=entry.source)
      )
    if entry.host is not None:
      found.append(
        origins.Origin(kind="host", devices=frozenset(), params=entry.host)
      )
    return found


def _rescue(copy: Any) -> Any:
  """Reads params from devices that may have failed; None where they have."""
  try:
    return jax.tree.map(reshard.to_host, copy)
  # What a dead device answers with; jax.errors.JaxRuntimeError is one.
  except RuntimeError as error:
    logging.warning("The last copy of a version cannot be read: %s", error)
    return None
