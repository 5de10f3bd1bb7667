"""Our trainer, driven alone, on one CPU device."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax import types
from dora_jax.model import transformer
from dora_jax.parallel import meshes
from dora_jax.trainer import (
  advantages,
  objective,
  optimizers,
  shaping,
  train_step,
)
from dora_jax.trainer.attention import choice

_OPTIMIZER = optimizers.OptimizerSettings(
  kind="adamw",
  lr=1e-6,
  warmup_steps=0,
  total_steps=1,
  schedule="constant",
  b1=0.9,
  b2=0.999,
  eps=1e-8,
  momentum=0.95,
  weight_decay=1e-4,
  clip_norm=1.0,
  average_decay=0.0,
)

# GRPO's, as DeepSeekMath has it, without the KL.
_OBJECTIVE = objective.Objective(
  loss="ppo_clip",
  proximal="behavior",
  correction="none",
  aggregation="sequence_mean",
  kl="none",
  kl_coefficient=0.0,
  entropy_coefficient=0.0,
  clip_low=0.2,
  clip_high=0.2,
  clip_loss=3.0,
  divergence=0.2,
  weight_floor=0.5,
  weight_cap=2.0,
  sequence_floor=0.9,
  sequence_cap=1.1,
  constant_length=1,
)


class Spent(NamedTuple):
  """What a step took.

  Attributes:
    seconds: by the clock.
    cpu_seconds: of all cores.
    padding_share: of the tokens in its rows.
  """

  seconds: float
  cpu_seconds: float
  padding_share: float


class OurTrainer:
  """Makes steps on groups of random tokens.

  Attributes:
    num_params: of the model.
  """

  def __init__(
    self,
    config: transformer.ModelConfig,
    *,
    row_length: int,
    rows_per_batch: int,
  ):
    mesh = meshes.split_devices(
      jax.devices()[:1],
      trainer_fsdp=1,
      trainer_sequence=1,
      trainer_tensor=1,
      num_generators=1,
      generator_tensor=1,
      colocated=True,
    ).trainer
    params = transformer.init_params(config, key=jax.random.key(0))
    self.num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    self._trainer = train_step.Trainer(
      config=config,
      mesh=mesh,
      params=params,
      optimizer=_OPTIMIZER,
      supervised_lr=1e-6,
      row_length=row_length,
      rows_per_batch=rows_per_batch,
      objective=_OBJECTIVE,
      advantage=advantages.Settings(kind="grpo", pass_k=2, per_version=False),
      shaping=shaping.Shaping(
        weights={},
        overlong_penalty=0.0,
        overlong_buffer=1,
        max_length=row_length,
        masks_truncated=False,
      ),
      critic=None,
      adapters=None,
      recomputes_logprobs=False,
      max_staleness=0,
      temperature=1.0,
      attention=choice.choose(
        "auto", mesh, config=config, row_length=row_length
      ),
      compute_dtype=jnp.float32,
      logprob_chunk=row_length,
      remat=False,
    )

  def step(
    self,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    group_size: int,
  ) -> Spent:
    """One training step, from groups on the host to metrics on the host."""
    version = self._trainer.version
    members = [
      types.Trajectory(
        group_id=index // group_size,
        member=index % group_size,
        version=version,
        token_versions=np.full(len(completion), version, np.int32),
        prompt=np.asarray(prompt, np.int32),
        completion=np.asarray(completion, np.int32),
        behavior_logprobs=np.full(len(completion), -6.0, np.float32),
        kept_mass=np.ones(len(completion), np.float32),
        finish_reason="stop",
      )
      for index, (prompt, completion) in enumerate(
        zip(prompts, completions, strict=True)
      )
    ]
    groups = [
      types.Group(
        group_id=at // group_size,
        prompt=types.Prompt(
          prompt_id=at, tokens=members[at].prompt, text="", answer=""
        ),
        trajectories=tuple(members[at : at + group_size]),
        rewards=np.arange(group_size) % 2.0,
      )
      for at in range(0, len(members), group_size)
    ]
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    metrics = self._trainer.train(groups)
    jax.block_until_ready(self._trainer.params())
    return Spent(
      seconds=time.perf_counter() - start_s,
      cpu_seconds=time.process_time() - start_cpu_s,
      padding_share=metrics["train/padding_share"],
    )
