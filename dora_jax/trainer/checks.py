"""Refuses what the trainer could not work with: settings, and tokens."""

from collections.abc import Iterable, Sequence

import jax

from dora_jax import types
from dora_jax.trainer import (
  advantages,
  aggregation,
  losses,
  objective,
  ratios,
  regularizers,
)


def check_layout(
  mesh: jax.sharding.Mesh,
  *,
  row_length: int,
  rows_per_batch: int,
  temperature: float,
) -> None:
  """Refuses settings that no step could work with."""
  num_shares = mesh.shape["fsdp"]
  if rows_per_batch % num_shares:
    raise ValueError(
      f"{rows_per_batch} rows per batch do not divide among {num_shares} "
      "devices: make config.trainer.rows_per_batch a multiple of "
      "config.mesh.trainer_fsdp."
    )
  num_shares = mesh.shape["sequence"]
  if row_length % num_shares:
    raise ValueError(
      f"Rows of {row_length} tokens do not divide among {num_shares} devices: "
      "make config.trainer.row_length a multiple of "
      "config.mesh.trainer_sequence."
    )
  if temperature <= 0.0:
    raise ValueError(
      f"Temperature is {temperature}; training needs sampling above 0: raise "
      "config.generator.temperature."
    )


def check_vocabulary(
  batches: Sequence[types.PackedBatch], vocab_size: int
) -> None:
  """Refuses tokens that the model would silently take for others."""
  for batch in batches:
    low, high = batch.tokens.min(), batch.tokens.max()
    if low < 0 or high >= vocab_size:
      raise ValueError(
        f"Token ids reach from {low} to {high}, but the model knows 0 to "
        f"{vocab_size - 1}: the tokenizer must match config.model."
      )


def check_objective(
  chosen: objective.Objective,
  *,
  max_staleness: int,
  mixes_versions: bool,
  recomputes_logprobs: bool,
  truncates_sampling: bool,
) -> None:
  """Refuses names that do not exist and choices that do not go together.

  Args:
    chosen: as config.trainer has it.
    max_staleness: K of the schedule.
    mixes_versions: whether trajectories hold tokens of several versions.
    recomputes_logprobs: see recall.Recall.
    truncates_sampling: whether the generators leave unlikely tokens out, so
      that they sample from another distribution than the trainer computes.

  Raises:
    ValueError: says what is found, what is needed, and the field to change.
  """
  _check_names(chosen)
  _check_bounds(chosen)
  if mixes_versions and not chosen.takes_mixed:
    raise ValueError(
      f"config.trainer.proximal is {chosen.proximal!r} but must be "
      "'current' or 'loglinear' where config.coordinator.schedule mixes "
      "versions in a trajectory."
    )
  if chosen.proximal == "recomputed" and not recomputes_logprobs:
    raise ValueError(
      "config.trainer.recompute_logprobs is False but must be True where "
      'config.trainer.proximal is "recomputed".'
    )
  if max_staleness > 0 and not chosen.is_stale_proof:
    raise ValueError(
      f"Trajectories may be {max_staleness} versions old, but neither "
      f"config.trainer.loss {chosen.loss!r} around config.trainer.proximal "
      f"{chosen.proximal!r} nor config.trainer.correction "
      f"{chosen.correction!r} bounds what stale ones do: set proximal to "
      '"behavior" with a loss that has a trust region, or correction to "tis" '
      'with proximal "current", or config.coordinator.max_staleness to 0.'
    )
  is_corrected = chosen.correction != "none" and (chosen.proximal != "behavior")
  if truncates_sampling and not is_corrected:
    raise ValueError(
      "config.generator.top_k, top_p or min_p leaves unlikely tokens out, so "
      "that recorded log-probabilities are those of another distribution than "
      f"the trainer's, but config.trainer.correction is "
      f"{chosen.correction!r} around config.trainer.proximal "
      f'{chosen.proximal!r}: set them to "tis" and "current", or sample from '
      "all tokens."
    )


def check_advantage(kind: str, *, loss: str) -> None:
  """Refuses an advantage that the loss cannot take."""
  if kind in advantages.BY_CRITIC and loss == "vtrace":
    raise ValueError(
      f"config.trainer.advantage is {kind!r}, by which each token has one of "
      'its own, but config.trainer.loss "vtrace" takes one for the whole '
      'sequence: set loss to "aipo", which weighs tokens alike.'
    )


def _check_names(chosen: objective.Objective) -> None:
  choices: dict[str, Iterable[str]] = {
    "loss": losses.LOSSES,
    "proximal": ratios.PROXIMAL,
    "correction": ratios.CORRECTIONS,
    "aggregation": aggregation.AGGREGATIONS,
    "kl": ("none", *regularizers.ESTIMATES),
  }
  for field, names in choices.items():
    found = getattr(chosen, field)
    if found not in names:
      raise ValueError(
        f"config.trainer.{field} is {found!r} but must be one of "
        f"{', '.join(map(repr, names))}."
      )
  if chosen.proximal == "behavior" and chosen.correction != "none":
    raise ValueError(
      f"config.trainer.correction is {chosen.correction!r}, but around "
      'config.trainer.proximal "behavior" there is nothing to correct: set '
      'proximal to "current", "loglinear" or "recomputed", or correction to '
      '"none".'
    )


def _check_bounds(chosen: objective.Objective) -> None:
  if chosen.weight_cap < 1.0 or not 0.0 <= chosen.weight_floor < 1.0:
    raise ValueError(
      f"config.trainer.weight_floor is {chosen.weight_floor} and weight_cap "
      f"{chosen.weight_cap}, but a weight of 1 must lie between them, and "
      "the floor must be at least 0."
    )
  if not 0.0 <= chosen.sequence_floor < 1.0 <= chosen.sequence_cap:
    raise ValueError(
      f"config.trainer.sequence_floor is {chosen.sequence_floor} and "
      f"sequence_cap {chosen.sequence_cap}, but a ratio of 1 must lie "
      "between them, and the floor must be at least 0."
    )
  if chosen.kl_coefficient < 0.0 or chosen.entropy_coefficient < 0.0:
    raise ValueError(
      f"config.trainer.kl_coefficient is {chosen.kl_coefficient} and "
      f"entropy_coefficient {chosen.entropy_coefficient}, but both must be "
      "at least 0."
    )
  if chosen.loss == "dual_clip" and (
    chosen.clip_loss <= 1.0 + chosen.clip_high
  ):
    raise ValueError(
      f"config.trainer.clip_loss is {chosen.clip_loss} but must be above 1 + "
      f"clip_high, {1.0 + chosen.clip_high}, for it to bound unlikely cases "
      "alone."
    )
