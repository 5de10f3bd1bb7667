"""A coordinator in the middle of a run, set up by hand."""

from collections.abc import Mapping, Sequence

from dora_jax.coordinator import balance, coordinator
from dora_jax.coordinator import events as ev
from dora_jax.coordinator import fleet as fleet_lib
from dora_jax.coordinator.schedules import base, dora
from tests.coordinator import world as world_lib


def coordinator_of(
  generators: Sequence[tuple[int | None, Mapping[int, Sequence[int]]]],
  *,
  newest_version: int,
  num_slots: int = 8,
  group_size: int = 1,
  prompts_per_batch: int = 8,
  max_staleness: int = 3,
  rollout_groups: int = 0,
  evict: bool = False,
  is_training: bool = True,
  lanes_per_mesh: int = 1,
  **settings,
) -> coordinator.Coordinator:
  """Seats requests as they are said to sit.

  Args:
    generators: of each its version, and what it runs: group_id -> members.
      Groups have the version of the generator; ids start at 0 without a gap.
    newest_version: the newest version that exists.
    num_slots: of each generator.
    group_size: M.
    prompts_per_batch: P.
    max_staleness: K.
    rollout_groups: RBS in groups.
    evict: see `dora.Dora`.
    is_training: whether a step is being made.
    lanes_per_mesh: generators on each mesh.
    **settings: of the balancer, over those of the world.
  """
  made = coordinator.Coordinator(
    schedule=dora.Dora(
      base.Options(
        max_staleness=max_staleness,
        prompts_per_batch=prompts_per_batch,
        rollout_groups=rollout_groups,
        oversample=1.0,
        evict=evict,
      )
    ),
    balance_settings=balance.Settings(**{**world_lib.SETTINGS, **settings}),
    group_size=group_size,
    prompts_per_batch=prompts_per_batch,
    num_steps=1000,
  )
  made._view.newest_version = newest_version
  made._view.is_training = is_training
  made._serving._held = {v for v, _ in generators if v is not None} | {
    newest_version
  }
  versions = {}
  for version, groups in generators:
    versions |= dict.fromkeys(groups, version)
  for group_id in sorted(versions):
    assert made.ledger.start(versions[group_id]).group_id == group_id
  for generator_id, (version, groups) in enumerate(generators):
    view = fleet_lib.GeneratorView(
      generator_id=generator_id,
      num_slots=num_slots,
      mesh_id=generator_id // lanes_per_mesh,
      kv_capacity=10_000,
      version=version,
    )
    for group_id, members in groups.items():
      group = made.ledger.open[group_id]
      for member in members:
        group.waiting.remove(member)
        group.running[member] = generator_id
        view.residents[group_id, member] = None
    made.fleet.add(view)
  return made


def finish(group_id: int, member: int, *, on: int, version: int) -> ev.Finished:
  """A request has ended."""
  return ev.Finished(
    generator_id=on,
    group_id=group_id,
    member=member,
    version=version,
    num_tokens=5,
  )


def moved(move: ev.Move, *, left: Sequence[tuple[int, int]] = ()) -> ev.Moved:
  """A move has ended; what is not left behind has arrived."""
  return ev.Moved(
    source_id=move.source_id,
    target_id=move.target_id,
    moved=tuple(r for r in move.requests if r not in left),
    left=tuple(left),
    num_kv_tokens=7,
  )


def of_class(commands: Sequence[ev.Command], kind: type) -> list:
  """Those of one class."""
  return [command for command in commands if isinstance(command, kind)]
