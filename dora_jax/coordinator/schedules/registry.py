"""All schedules, by the names with which a config chooses one."""

from dora_jax.coordinator.schedules import (
  base,
  dora,
  one_step_off,
  partial_rollout,
  replication,
  sync,
)

_ALL: tuple[type[base.Schedule], ...] = (
  sync.Sync,
  one_step_off.OneStepOff,
  partial_rollout.PartialRollout,
  replication.Replication,
  dora.Dora,
)
NAMES = tuple(schedule.name for schedule in _ALL)


def create(name: str, options: base.Options) -> base.Schedule:
  """Builds the schedule of this name.

  Raises:
    ValueError: there is none.
  """
  for schedule in _ALL:
    if schedule.name == name:
      return schedule(options)
  raise ValueError(
    f"Unknown schedule {name!r}: config.coordinator.schedule is one of "
    f"{', '.join(map(repr, NAMES))}."
  )
