"""Params of the past, by which log-probabilities are computed once more.

Two uses: the version that sampled a token tells what engine and trainer
disagree about; the reference tells how far the policy has gone. Copies are kept
on the trainer mesh, in the dtype in which the training forward computes, so
that nothing is rounded twice.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dora_jax import interfaces, types
from dora_jax.trainer import device_batch, gradients

_REFERENCE = "reference"


class Recall:
  """Keeps the params that steps to come will ask for."""

  def __init__(
    self,
    *,
    settings: gradients.LossSettings,
    mesh: jax.sharding.Mesh,
    recomputes: bool,
    max_staleness: int,
  ):
    """Keeps nothing yet.

    Args:
      settings: of the training forward.
      mesh: of the trainer.
      recomputes: whether versions are kept at all: max_staleness of them, each
        of the size of the params in the compute dtype.
      max_staleness: K, how old a trajectory may be.
    """
    self._copy = gradients.make_copy(
      settings.config, mesh, settings.compute_dtype
    )
    self._score = gradients.make_score(settings, settings.temperature)
    self._recomputes = recomputes
    self._max_staleness = max_staleness
    self._has_reference = settings.objective.kl != "none"
    self._reference: interfaces.Params | None = None
    self._past: dict[int, interfaces.Params] = {}

  def begin(self, version: int, params: interfaces.Params) -> None:
    """Keeps the params from which a step starts, as far as they are needed.

    The reference is what the first step starts from.

    Raises:
      RuntimeError: there is no reference, and this is not the first step.
    """
    if self._has_reference and self._reference is None:
      if version:
        raise RuntimeError(
          f"Step {version} needs the reference, version 0, which was not "
          'saved: set config.trainer.kl to "none".'
        )
      self._reference = self._copy(params)
    if self._recomputes:
      oldest = version - self._max_staleness
      self._past = {v: p for v, p in self._past.items() if v >= oldest}
      self._past[version] = self._copy(params)

  def kept(self) -> dict[str, interfaces.Params]:
    """All that is kept, by name: the reference, and versions."""
    named = {} if self._reference is None else {_REFERENCE: self._reference}
    return named | {str(version): p for version, p in self._past.items()}

  def abstract(self, params: interfaces.Params) -> interfaces.Params:
    """Shapes, dtypes and shardings of a copy of these params."""
    return jax.tree.map(
      lambda leaf, param: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=param.sharding
      ),
      jax.eval_shape(self._copy, params),
      params,
    )

  def restore(self, named: Mapping[str, interfaces.Params]) -> None:
    """Keeps what `kept` gave."""
    kept = dict(named)
    self._reference = kept.pop(_REFERENCE, None)
    self._past = {int(name): params for name, params in kept.items()}

  def logprobs(
    self,
    arrays: device_batch.DeviceBatch,
    batch: types.PackedBatch,
    *,
    version: int,
  ) -> Mapping[str, Float[jax.Array, "B T"]]:
    """What the loss needs of a micro-batch beside `device_batch.put`.

    Raises:
      ValueError: a version that sampled a token is not kept.
    """
    found = {}
    if self._recomputes:
      found["recomputed_logprobs"] = self._recomputed(arrays, batch, version)
    if self._reference is not None:
      found["ref_logprobs"], _ = self._score(self._reference, arrays)
    return found

  def _recomputed(
    self,
    arrays: device_batch.DeviceBatch,
    batch: types.PackedBatch,
    version: int,
  ) -> Float[jax.Array, "B T"]:
    """Each token's log-probability under the version that sampled it."""
    logprobs_BT = jnp.zeros_like(arrays["behavior_logprobs"])
    for lag in np.unique(batch.lags[batch.loss_mask > 0.0]).tolist():
      if version - lag not in self._past:
        raise ValueError(
          f"Step {version} has tokens of version {version - lag}, but the "
          f"trainer keeps {sorted(self._past)}: set "
          "config.trainer.recompute_logprobs to False."
        )
      of_lag_BT, _ = self._score(self._past[version - lag], arrays)
      logprobs_BT = jnp.where(arrays["lags"] == lag, of_lag_BT, logprobs_BT)
    return logprobs_BT
