"""Makes the trainer's versions available to generators; on its thread."""

import time
from typing import Any

import jax
from absl import logging

from dora_jax import trace
from dora_jax.runtime import canary as canary_lib
from dora_jax.trainer import train_step
from dora_jax.weights import frozen_base
from dora_jax.weights import store as store_lib


class Publisher:
  """Publishes versions whole, or as adapters on a base that is sent once."""

  def __init__(
    self,
    *,
    trainer: train_step.Trainer,
    store: store_lib.WeightStore,
    base: frozen_base.FrozenBase | None,
    canary: canary_lib.Canary,
    timeline: trace.Trace,
  ):
    """Wires.

    Args:
      trainer: has the versions.
      store: gets each version, or where there is a base the adapters on it.
      base: gets what no version changes, before the first; None for none.
      canary: learns what each version makes of it.
      timeline: of the run.
    """
    self._trainer = trainer
    self._store = store
    self._base = base
    self._canary = canary
    self._trace = timeline
    self._track = timeline.track("publish", "weights")

  def publish(self) -> store_lib.Publication:
    """Makes the trainer's version available."""
    if self._base is not None and self._base.num_bytes is None:
      self._place(self._base)
    start_s = time.perf_counter()
    version, sent = self._trainer.version, self._sent()
    try:
      publication = self._store.publish(version, sent, holder="coordinator")
    # Nobody has it yet, and the version before is served meanwhile.
    except jax.errors.JaxRuntimeError as error:
      logging.warning(
        "Version %d is published again, as that has failed: %s", version, error
      )
      publication = self._store.publish(version, sent, holder="coordinator")
    params = self._trainer.params()
    logprobs = self._trainer.logprobs_of(params, self._canary.tokens)
    self._canary.expected[version] = logprobs[1:]
    # Of versions that nobody can be sent any more.
    alive = self._store.versions()
    for gone in self._canary.expected.keys() - {version, *alive}:
      del self._canary.expected[gone]
    self._trace.span(
      self._track,
      f"v{version}",
      start_s,
      time.perf_counter(),
      bytes=publication.num_bytes,
      arrays_changed=publication.num_changed,
    )
    return publication

  def abstract(self) -> Any:
    """Shapes and dtypes of a version as it is published."""
    return self._store.published_form(self._sent())

  def _place(self, base: frozen_base.FrozenBase) -> None:
    """Sends the base, before any version and before the parts begin."""
    start_s = time.perf_counter()
    base.place(self._trainer.frozen())
    self._trace.span(
      self._track, "base", start_s, time.perf_counter(), bytes=base.num_bytes
    )

  def _sent(self) -> Any:
    """What generators need of the trainer's version beside the base."""
    if self._base is None:
      return self._trainer.params()
    return self._trainer.trained()
