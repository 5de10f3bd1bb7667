"""Optimizers and their schedules, all of optax."""

import dataclasses
from typing import Any, Literal

import jax
import optax

from dora_jax.trainer import trained as trained_lib

# Of Muon: updates get the root mean square that AdamW's have, so that one
# learning rate serves both (https://arxiv.org/abs/2502.16982, section 2.2).
_MUON_RMS = 0.2
# Of Adafactor: the largest root mean square of an array's update before the
# learning rate (https://arxiv.org/abs/1804.04235, section 6).
_ADAFACTOR_RMS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
  """An optimizer after a clip of the global gradient norm.

  Attributes:
    kind: see `make_optimizer`.
    lr: learning rate after the warm-up.
    warmup_steps: updates over which the learning rate rises linearly.
    total_steps: updates after which a falling schedule has reached 0.
    schedule: of the learning rate after the warm-up.
    b1: decay of AdamW's first moment.
    b2: decay of AdamW's second moment.
    eps: added to the root of AdamW's second moment.
    momentum: decay of Muon's moment.
    weight_decay: decoupled, times the learning rate; applies to every param.
    clip_norm: largest global gradient norm; inf never clips.
    average_decay: of the running average of the params, an update; 0 keeps no
      average.
  """

  kind: Literal["adamw", "muon", "adafactor"]
  lr: float
  warmup_steps: int
  total_steps: int
  schedule: Literal["constant", "linear", "cosine"]
  b1: float
  b2: float
  eps: float
  momentum: float
  weight_decay: float
  clip_norm: float
  average_decay: float


def make_schedule(settings: OptimizerSettings) -> optax.Schedule:
  """Learning rate as a function of the number of updates before this one.

  It is lr * (n + 1) / (warmup_steps + 1) while n < warmup_steps, so that the
  first update already moves the params.
  """
  decay_steps = settings.total_steps - settings.warmup_steps
  if settings.schedule != "constant" and decay_steps < 1:
    raise ValueError(
      f"A {settings.schedule} schedule of {settings.total_steps} steps has no "
      f"room for {settings.warmup_steps} steps of warm-up: lower "
      "config.trainer.warmup_steps."
    )
  match settings.schedule:
    case "constant":
      after = optax.constant_schedule(settings.lr)
    case "linear":
      after = optax.linear_schedule(settings.lr, 0.0, decay_steps)
    case "cosine":
      after = optax.cosine_decay_schedule(settings.lr, decay_steps)
    case unknown:
      raise ValueError(
        f"Unknown schedule {unknown!r}, need 'constant', 'linear' or 'cosine': "
        "change config.trainer.schedule."
      )
  if settings.warmup_steps == 0:
    return after
  start_lr = settings.lr / (settings.warmup_steps + 1)
  warmup = optax.linear_schedule(start_lr, settings.lr, settings.warmup_steps)
  return optax.join_schedules([warmup, after], [settings.warmup_steps])


def make_optimizer(
  settings: OptimizerSettings, trained: trained_lib.Trained
) -> optax.GradientTransformation:
  """The optimizer with global-norm clipping.

  adamw      https://arxiv.org/abs/1711.05101, algorithm 2
  muon       momentum made orthogonal, for the layers' matrices, each of every
             layer by itself; AdamW with the same learning rate for the rest;
             Nesterov's momentum in both
             (https://kellerjordan.github.io/posts/muon)
  adafactor  without momentum and relative steps; the second moment of an array
             with two axes of at least 128 is kept as that of its rows and
             columns (https://arxiv.org/abs/1804.04235)
  """
  if settings.clip_norm <= 0.0:
    raise ValueError(
      f"clip_norm is {settings.clip_norm}, need more than 0 (inf never clips): "
      "change config.trainer.clip_norm."
    )
  chain = optax.chain(
    optax.clip_by_global_norm(settings.clip_norm),
    _after_clip(settings, trained),
  )

  def update(updates, state, params=None):
    # optax raises b1 to an integer count, which strict promotion refuses.
    with (
      jax.numpy_dtype_promotion("standard"),
      jax.numpy_rank_promotion("allow"),
    ):
      return chain.update(updates, state, params)

  return optax.GradientTransformation(chain.init, update)


def _after_clip(
  settings: OptimizerSettings, trained: trained_lib.Trained
) -> optax.GradientTransformation:
  schedule = make_schedule(settings)
  match settings.kind:
    case "adamw":
      return optax.adamw(
        schedule,
        b1=settings.b1,
        b2=settings.b2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
      )
    case "muon":
      return optax.contrib.muon(
        schedule,
        beta=settings.momentum,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        adam_b1=settings.b1,
        adam_b2=settings.b2,
        adam_weight_decay=settings.weight_decay,
        muon_weight_dimension_numbers=lambda _: _muon_axes(trained),
        consistent_rms=_MUON_RMS,
      )
    case "adafactor":
      # optax.adafactor would not multiply its weight decay by the learning
      # rate.
      return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(_ADAFACTOR_RMS),
        optax.add_decayed_weights(settings.weight_decay),
        optax.scale_by_learning_rate(schedule),
      )
    case unknown:
      raise ValueError(
        f"Unknown optimizer {unknown!r}, need 'adamw', 'muon' or 'adafactor': "
        "change config.trainer.optimizer."
      )


def _muon_axes(trained: trained_lib.Trained) -> Any:
  """What optax wants to know of each param: its axes, or None."""
  return jax.tree.map(
    lambda axes: (
      axes
      and optax.contrib.MuonDimensionNumbers(
        reduction_axis=axes.summed, output_axis=axes.output
      )
    ),
    trained.matrix_axes(),
    is_leaf=lambda node: (
      node is None or isinstance(node, trained_lib.MatrixAxes)
    ),
  )
