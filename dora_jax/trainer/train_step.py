"""The trainer: groups in, the next version's params and metrics out."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from absl import logging
from jaxtyping import Float, Int

from dora_jax import interfaces, types
from dora_jax.model import transformer
from dora_jax.parallel import axes
from dora_jax.trainer import (
  advantages,
  aggregation,
  alarm,
  batching,
  checks,
  device_batch,
  gradients,
  health,
  lora,
  optimization,
  optimizers,
  packing,
  recall,
  train_state,
)
from dora_jax.trainer import critic as critic_lib
from dora_jax.trainer import objective as objective_lib
from dora_jax.trainer import shaping as shaping_lib
from dora_jax.trainer import trained as trained_lib
from dora_jax.trainer.attention import base

_Phase = Literal["policy", "supervised"]

# Why a step has changed nothing.
NONFINITE = "nonfinite_gradient"
NO_TOKEN = "no_token_to_train_on"


# Beyond that, compiling takes longer than many steps gain.
_MOST_UNROLLED = 8


class Trainer:
  """Params, optimizer and train step on one mesh; see meshes.make_trainer_mesh.

  A step is one optimizer update by the objective over all sampled tokens of its
  groups. It may start with a supervised phase (the cold start), which
  has an optimizer of its own and makes no versions; the first `train` drops
  that optimizer's state.

  Attributes:
    version: number of `train` steps behind the params. A step whose gradient
      was not finite counts too, and one that left all trajectories out of the
      loss: its trajectories are spent, its params are those of the version
      before.
  """

  version: int

  def __init__(
    self,
    *,
    config: transformer.ModelConfig,
    mesh: jax.sharding.Mesh,
    params: interfaces.Params,
    optimizer: optimizers.OptimizerSettings,
    supervised_lr: float,
    row_length: int,
    rows_per_batch: int,
    objective: objective_lib.Objective,
    advantage: advantages.Settings,
    critic: critic_lib.Settings | None,
    adapters: lora.Settings | None,
    shaping: shaping_lib.Shaping,
    recomputes_logprobs: bool,
    max_staleness: int,
    temperature: float,
    attention: base.SegmentAttention,
    compute_dtype: jax.typing.DTypeLike,
    logprob_chunk: int,
    remat: bool,
    version: int = 0,
  ) -> None:
    """Copies the params onto the mesh; compiles at the first use.

    Args:
      config: of the model.
      mesh: with axes "fsdp", "sequence" and "tensor".
      params: initial ones, in any dtype and layout; stay the caller's.
      optimizer: for `train`.
      supervised_lr: constant learning rate for `train_supervised`, which
        takes the other settings from `optimizer`.
      row_length: tokens in a packed row.
      rows_per_batch: rows in a micro-batch.
      objective: of the policy.
      advantage: how rewards become advantages.
      critic: by which single tokens are judged; None where there is none.
      adapters: which `train` trains in place of all params; None for all.
      shaping: what counts as a reward, and who is left out of the loss.
      recomputes_logprobs: at the versions that sampled, by the training
        forward; see recall.Recall for what it costs.
      max_staleness: K, how old a trajectory may be.
      temperature: at which the generators sample.
      attention: within the segments of a row.
      compute_dtype: of the forward and backward pass; params stay float32.
      logprob_chunk: see logprobs.token_logprobs.
      remat: see logprobs.token_logprobs.
      version: of the initial params.
    """
    checks.check_layout(
      mesh,
      row_length=row_length,
      rows_per_batch=rows_per_batch,
      temperature=temperature,
    )
    self.version = version
    self._mesh = mesh
    self._rows, hidden = axes.shardings(
      [("row", "token"), ("row", "token", "norm")], mesh, axes.TRAIN
    )
    self._row_length = row_length
    self._rows_per_batch = rows_per_batch
    self._settings = gradients.LossSettings(
      config=config,
      objective=objective,
      temperature=temperature,
      attention=attention,
      compute_dtype=compute_dtype,
      logprob_chunk=logprob_chunk,
      remat=remat,
      unrolls=_unrolls(config, mesh, remat=remat),
      hidden_sharding=hidden,
    )
    self._optimizers: dict[_Phase, optimizers.OptimizerSettings] = {
      "policy": optimizer,
      "supervised": dataclasses.replace(
        optimizer,
        lr=supervised_lr,
        warmup_steps=0,
        schedule="constant",
        average_decay=0.0,
      ),
    }
    self._advantage = advantage
    self._shaping = shaping
    self._recall = recall.Recall(
      settings=self._settings,
      mesh=mesh,
      recomputes=recomputes_logprobs,
      max_staleness=max_staleness,
    )
    self._alarm = alarm.TrendAlarm()
    self._num_empty = 0
    self.skipped: str | None = None
    self._score = gradients.make_score(self._settings, 1.0)
    self._critic_settings = critic
    self._adapters = adapters
    self._critic: critic_lib.Critic | None = None
    self._enter("policy", params)

  def params(self) -> interfaces.Params:
    """Of the model in float32, sharded for training; valid until next step."""
    return self._policy.params()

  def trained(self) -> interfaces.Params:
    """What `train` changes, likewise: the params, or adapters of them.

    Ends a supervised phase, in which there are no adapters.
    """
    self._enter_policy()
    return self._policy.state.params

  def frozen(self) -> interfaces.Params | None:
    """What adapters are on, in the compute dtype; None where there are none.

    Ends a supervised phase too. No step changes it.
    """
    self._enter_policy()
    return self._policy.frozen

  def state(self) -> train_state.TrainState:
    """What a checkpoint must hold beside `version`; valid until next step.

    Ends a supervised phase, of which no optimizer state is kept.
    """
    self._enter_policy()
    critic = self._critic and self._critic.optimization.state
    return dataclasses.replace(
      self._policy.state, critic=critic, frozen=self._policy.frozen
    )

  def abstract_state(self) -> train_state.TrainState:
    """Shapes, dtypes and shardings of `state`, to restore into."""
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      self.state(),
    )

  def restore(self, state: train_state.TrainState, *, version: int) -> None:
    """Continues from a state saved after `train`; takes it over."""
    self._enter_policy()
    self._policy.frozen = state.frozen
    self._policy.state = dataclasses.replace(state, critic=None, frozen=None)
    if self._critic is not None:
      self._critic.optimization.state = state.critic
    self.version = version

  def memory(self) -> dict[str, Any]:
    """What it keeps between steps beside arrays, JSON-able."""
    return {
      "nonfinite": self._policy.num_nonfinite,
      "empty": self._num_empty,
      "alarm": self._alarm.state(),
      "recalled": list(self._recall.kept()),
    }

  def recalled(self) -> dict[str, interfaces.Params]:
    """Params of the past that steps to come will ask for, by name."""
    return self._recall.kept()

  def abstract_recalled(self, memory: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes, dtypes and shardings of what `recalled` was, to restore into."""
    abstract = self._recall.abstract(self.params())
    return dict.fromkeys(memory["recalled"], abstract)

  def remember(
    self, memory: Mapping[str, Any], recalled: Mapping[str, interfaces.Params]
  ) -> None:
    """Goes on with the memory of the trainer that was saved."""
    self._policy.num_nonfinite = memory["nonfinite"]
    self._num_empty = memory["empty"]
    self._alarm.restore(memory["alarm"])
    self._recall.restore(recalled)

  def train(self, groups: Sequence[types.Group]) -> Mapping[str, float]:
    """Makes one training step, advances `version` by one, returns metrics.

    A step whose gradient is not finite, or that has no token to train on,
    changes nothing and makes no version: `skipped` says which of them.

    Raises:
      ValueError: see batching.make_step.
    """
    batches, shaped = batching.make_step(
      groups,
      shaping=self._shaping,
      advantage=self._advantage,
      takes_mixed=self._settings.objective.takes_mixed,
      version=self.version,
      row_length=self._row_length,
      rows_per_batch=self._rows_per_batch,
    )
    self._enter_policy()
    self._recall.begin(self.version, self.params())
    if batches:
      judged = {}
      if self._critic is not None:
        batches, judged = self._critic.step(batches, self.params())
      num_before = self._policy.num_nonfinite
      metrics, stats = self._step(batches)
      is_applied = self._policy.num_nonfinite == num_before
      self.skipped = None if is_applied else NONFINITE
      metrics |= judged
      metrics |= health.ratio_metrics(batches, stats)
      metrics |= health.worst_trajectory(batches, stats, groups)
      alarm.watch_mismatch(self._alarm, metrics)
    else:
      metrics, self.skipped = self._empty_step(), NO_TOKEN
    metrics |= health.group_metrics(groups, version=self.version)
    metrics |= shaping_lib.component_metrics(shaped)
    if self.skipped is None:
      self.version += 1
    return {f"train/{name}": value for name, value in metrics.items()}

  def train_supervised(
    self, pairs: Sequence[packing.Pair]
  ) -> Mapping[str, float]:
    """Makes one update towards the completions of (prompt, completion) pairs.

    Raises:
      RuntimeError: after `train`, whose optimizer state it would destroy.
    """
    batches = packing.pack_examples(
      pairs, row_length=self._row_length, rows_per_batch=self._rows_per_batch
    )
    if self._phase != "supervised":
      if self.version or int(self._policy.state.step):
        raise RuntimeError(
          f"Supervised training at version {self.version}: it must come before "
          "the first policy step (set config.cold_start.steps to 0 on resume)."
        )
      self._enter("supervised", self.params())
    metrics, _ = self._step(batches)
    return {f"supervised/{name}": value for name, value in metrics.items()}

  def logprobs_of(
    self, params: interfaces.Params, tokens: Int[np.ndarray, "S"]
  ) -> Float[np.ndarray, "S"]:
    """Teacher-forced log-probabilities of one sequence, at temperature 1.

    Args:
      params: any version on the trainer mesh, in any dtype; computes in the
        compute dtype.
      tokens: of which the first has log-probability 0: nothing precedes it.
    """
    if len(tokens) > self._row_length:
      raise ValueError(
        f"A sequence of {len(tokens)} tokens does not fit into a row of "
        f"{self._row_length}: raise config.trainer.row_length."
      )
    # One row for each share of the mesh; the others stay padding.
    shape = (self._mesh.shape["fsdp"], self._row_length)
    batch = {
      name: np.zeros(shape, np.int32)
      for name in ("tokens", "positions", "segment_ids")
    }
    batch["tokens"][0, : len(tokens)] = tokens
    batch["positions"][0] = np.arange(self._row_length)
    batch["segment_ids"][0, : len(tokens)] = 1
    logprobs_BT, _ = self._score(params, jax.device_put(batch, self._rows))
    return np.asarray(logprobs_BT)[0, : len(tokens)]

  def _enter_policy(self) -> None:
    """Ends the supervised phase, if it is under way."""
    if self._phase != "policy":
      self._enter("policy", self.params())

  def _enter(self, phase: _Phase, params: interfaces.Params) -> None:
    """Starts a phase at these params, with a fresh optimizer state."""
    config, mesh = self._settings.config, self._mesh
    is_policy = phase == "policy"
    how: dict[str, Any] = {
      "loss_settings": self._settings,
      "optimizer": self._optimizers[phase],
      "mesh": mesh,
      "loss": gradients.policy_loss if is_policy else gradients.supervised_loss,
    }
    trained: trained_lib.Trained = trained_lib.Policy(config)
    start, frozen = params, None
    if is_policy and self._adapters is not None:
      trained = lora.Adapters(config, self._adapters)
      start = trained.start()
      copy = gradients.make_copy(config, mesh, self._settings.compute_dtype)
      frozen = copy(params)
    self._phase: _Phase = phase
    self._policy = optimization.Optimization(
      trained=trained, params=start, frozen=frozen, **how
    )
    if is_policy and self._critic_settings is not None:
      self._critic = critic_lib.Critic(
        settings=self._critic_settings,
        loss_settings=self._settings,
        mesh=mesh,
        rows=self._rows,
        params=params,
      )

  def _step(
    self, batches: Sequence[types.PackedBatch]
  ) -> tuple[dict[str, float], Sequence[gradients.TokenStats]]:
    """One update over all micro-batches; the host waits once, at its end."""
    checks.check_vocabulary(batches, self._settings.config.vocab_size)
    objective = self._settings.objective
    is_policy = self._phase == "policy"
    denominator = aggregation.denominator(
      objective.aggregation if is_policy else "token_mean",
      batches,
      constant_length=objective.constant_length,
    )
    loss, stats, update = self._policy.step(self._put(batches), denominator)
    return {
      "loss": loss,
      "grad_norm": float(update.grad_norm),
      "lr": float(update.lr),
      "nonfinite_steps": float(self._policy.num_nonfinite),
      "empty_steps": float(self._num_empty),
      **health.batch_metrics(batches, stats),
    }, stats

  def _put(
    self, batches: Sequence[types.PackedBatch]
  ) -> Iterator[dict[str, jax.Array]]:
    """The micro-batches on the devices, with what the loss needs besides."""
    for batch in batches:
      arrays = device_batch.put(batch, self._rows)
      if self._phase == "policy":
        arrays |= self._recall.logprobs(arrays, batch, version=self.version)
      yield arrays

  def _empty_step(self) -> dict[str, float]:
    """Counts a step of which no trajectory is trained on; changes nothing."""
    self._num_empty += 1
    logging.warning(
      "Step %d trains on nothing: all of its completions are truncated, and "
      "config.trainer.mask_truncated leaves them out.",
      self.version,
    )
    return {
      "loss": 0.0,
      "grad_norm": 0.0,
      "lr": 0.0,
      "nonfinite_steps": float(self._policy.num_nonfinite),
      "empty_steps": float(self._num_empty),
      "num_tokens": 0.0,
    }


def _unrolls(
  config: transformer.ModelConfig, mesh: jax.sharding.Mesh, *, remat: bool
) -> bool:
  """Whether to compile each layer by itself: on CPUs, few of them.

  Not where layers are computed again: XLA would see that it has done so, and
  keep what it was to forget.
  """
  is_cpu = mesh.devices.flat[0].platform == "cpu"
  return is_cpu and not remat and config.num_layers <= _MOST_UNROLLED
