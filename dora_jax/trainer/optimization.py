"""One loss, one optimizer, and what they train: of the policy, of a critic."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dora_jax import interfaces
from dora_jax.trainer import (
  accumulation,
  gradients,
  optimizers,
  train_state,
)
from dora_jax.trainer import trained as trained_lib


class Optimization:
  """Makes updates, each of the gradients of many micro-batches.

  Attributes:
    state: what the updates change; each replaces it, and frees the one before.
    frozen: what the forward pass takes besides; None where there is nothing.
    num_nonfinite: updates that were left out, for their gradient was not
      finite.
  """

  state: train_state.TrainState

  def __init__(
    self,
    *,
    trained: trained_lib.Trained,
    loss: gradients.Loss,
    loss_settings: gradients.LossSettings,
    optimizer: optimizers.OptimizerSettings,
    mesh: jax.sharding.Mesh,
    params: interfaces.Params,
    frozen: interfaces.Params | None,
  ):
    """Starts with a fresh optimizer state; compiles at the first use.

    Args:
      trained: describes the params.
      loss: of a micro-batch.
      loss_settings: of the loss.
      optimizer: makes updates of gradients.
      mesh: of the trainer.
      params: to start from, in any layout; stay the caller's.
      frozen: what the forward pass takes besides, laid out for it; taken over.
    """
    create = train_state.make_create(trained, mesh, optimizer)
    _, shardings = train_state.param_layout(trained, mesh)
    self.state = create(jax.device_put(params, shardings))
    self.frozen = frozen
    self.num_nonfinite = 0
    self._accumulation = accumulation.Accumulation(
      loss, loss_settings, trained, mesh
    )
    self._update = gradients.make_update(trained, mesh, optimizer)
    self._whole = gradients.make_whole(trained, mesh)

  def params(self) -> interfaces.Params:
    """Those of the forward pass; valid until the next update."""
    return self._whole(self.state.params, self.frozen)

  def step(
    self,
    batches: Iterable[Mapping[str, jax.Array]],
    denominator: np.float32,
  ) -> tuple[float, Sequence[Any], gradients.UpdateStats]:
    """Makes one update; the host waits once, at its end.

    Args:
      batches: micro-batches on the devices; asked for one after the other.
      denominator: of the whole step.

    Returns:
      The loss, what the loss tells of each micro-batch, and of the update.
    """
    total, told = self._accumulation.sum(
      self.state.params, self.frozen, batches, denominator
    )
    self.state, update = self._update(self.state, total)
    told, update = jax.device_get((told, update))
    told = self._accumulation.read(told)
    self.num_nonfinite += int(not update.is_applied)
    loss = float(sum(each.loss for each in told))
    return loss, [each.stats for each in told], update
