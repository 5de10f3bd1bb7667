"""What a crash leaves of a world: what was saved, and nothing else."""

import copy
import dataclasses
import json

from dora_jax.coordinator import events as ev
from tests.coordinator import world as world_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
  """A checkpoint: the coordinator's snapshot, as text, and what belongs to it.

  Attributes:
    snapshot: of the coordinator.
    world: its books at that instant.
  """

  snapshot: str
  world: world_lib.World


def save(world: world_lib.World) -> Saved:
  """Takes a checkpoint."""
  snapshot = json.dumps(world.coordinator.snapshot())
  return Saved(snapshot=snapshot, world=_copy(world))


def resume(saved: Saved, rng) -> world_lib.World:
  """Another process goes on; its generators need not be as many.

  Args:
    saved: stays as it is.
    rng: chooses which of the older versions were saved with it.
  """
  world = _copy(saved.world)
  made = world.coordinator = world.make_coordinator()
  made.restore(json.loads(saved.snapshot))
  if made._view.is_training:
    world.batches.pop()  # It will be asked for again.
    world.kept |= {*world.reused.pop()}
  needed = set(made.ledger.num_generating) - {made.newest_version}
  needed -= world.gone  # Nobody can have saved them.
  kept = {version for version in sorted(needed) if rng.random() < 0.5}
  world.freed |= set(range(made.newest_version)) - kept
  world.pending, world.paused = [], set()
  world.running, world.serving = {}, {}
  world.send(ev.Resumed(versions=tuple(sorted(kept))))
  world.slots = dict(enumerate(world.slots.values()))
  if len(world.slots) > 1 and rng.random() < 0.5:
    world.slots.popitem()
  for generator_id in world.slots:
    if world.stop is None:
      world.join(generator_id)
  return world


def _copy(world: world_lib.World) -> world_lib.World:
  """Books of their own, that may be written into."""
  books = copy.copy(world)
  for name, value in vars(books).items():
    if isinstance(value, dict | set | list):
      setattr(books, name, copy.copy(value))
  return books
