"""The names by which a config chooses a schedule."""

from dora_jax.coordinator.schedules import (
  base,
  dora,
  one_step_off,
  partial_rollout,
  replication,
  sync,
)

NAMES = ("sync", "one_step_off", "partial_rollout", "replication", "dora")


def create(
  name: str,
  *,
  max_staleness: int,
  prompts_per_batch: int,
  rollout_groups: int | None,
  oversample: float,
  evict: bool,
) -> base.Schedule:
  """Builds a schedule.

  Args:
    name: one of NAMES.
    max_staleness: K; of "partial_rollout" and "dora".
    prompts_per_batch: P.
    rollout_groups: see `dora.Dora`; of "partial_rollout" and "dora".
    oversample: see `replication.Replication`.
    evict: see `dora.Dora`; of "dora".
  """
  streaming = {
    "max_staleness": max_staleness,
    "prompts_per_batch": prompts_per_batch,
    "rollout_groups": rollout_groups,
  }
  match name:
    case "sync":
      return sync.Sync()
    case "one_step_off":
      return one_step_off.OneStepOff()
    case "replication":
      return replication.Replication(oversample=oversample)
    case "partial_rollout":
      return partial_rollout.PartialRollout(**streaming)
    case "dora":
      return dora.Dora(**streaming, evict=evict)
  raise ValueError(
    f"Unknown schedule {name!r}: config.coordinator.schedule is one of "
    f"{', '.join(map(repr, NAMES))}."
  )
