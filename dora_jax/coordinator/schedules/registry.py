"""The names by which a config chooses a schedule."""

from dora_jax.coordinator.schedules import base, dora, sync


def create(
  name: str,
  *,
  max_staleness: int,
  prompts_per_batch: int,
  rollout_groups: int | None,
) -> base.Schedule:
  """Builds a schedule; arguments as in `dora.Dora`."""
  if name == "sync":
    return sync.Sync()
  if name == "dora":
    return dora.Dora(
      max_staleness=max_staleness,
      prompts_per_batch=prompts_per_batch,
      rollout_groups=rollout_groups,
    )
  raise ValueError(
    f"Unknown schedule {name!r}: config.coordinator.schedule is one of "
    f"'sync', 'dora'."
  )
