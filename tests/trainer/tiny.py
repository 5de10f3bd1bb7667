"""A tiny model and the groups that its tests train on."""

import functools

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
  packing,
  shaping,
  train_step,
  trained,
)
from dora_jax.trainer.attention import xla

CONFIG = transformer.ModelConfig(
  vocab_size=16,
  width=32,
  mlp_width=64,
  num_layers=1,
  num_heads=4,
  num_kv_heads=2,
  head_width=8,
  rope_theta=10000.0,
  norm_eps=1e-6,
  qk_norm=False,
  qkv_bias=False,
  tied_head=True,
  max_positions=64,
)

POLICY = trained.Policy(CONFIG)

OPTIMIZER = optimizers.OptimizerSettings(
  kind="adamw",
  lr=1e-2,
  warmup_steps=0,
  total_steps=100,
  schedule="constant",
  b1=0.9,
  b2=0.99,
  # Large, so that the update is smooth in the gradient: with a small one Adam
  # would turn the rounding of a vanishing gradient into a full step.
  eps=1e-3,
  momentum=0.95,
  weight_decay=0.0,
  clip_norm=1.0,
  average_decay=0.0,
)

OBJECTIVE = objective.Objective(
  loss="ppo_clip",
  proximal="behavior",
  correction="none",
  aggregation="token_mean",
  kl="none",
  kl_coefficient=0.1,
  entropy_coefficient=0.0,
  clip_low=0.2,
  clip_high=0.28,
  clip_loss=3.0,
  divergence=0.2,
  weight_floor=0.5,
  weight_cap=2.0,
  sequence_floor=0.9,
  sequence_cap=1.1,
  constant_length=12,
)

ADVANTAGE = advantages.Settings(kind="grpo", pass_k=2, per_version=False)

SHAPING = shaping.Shaping(
  weights={},
  overlong_penalty=0.0,
  overlong_buffer=4,
  max_length=12,
  masks_truncated=False,
)


def pack(groups, *, version=0, row_length, rows_per_batch):
  """Packs all trajectories with their advantages, as a step does."""
  return packing.pack_groups(
    groups,
    advantages=advantages.advantages(
      [group.rewards for group in groups], [0] * len(groups), ADVANTAGE
    ),
    is_trained=[np.ones(len(group.rewards), bool) for group in groups],
    version=version,
    row_length=row_length,
    rows_per_batch=rows_per_batch,
  )


@functools.partial(jax.jit, static_argnums=0)
def make_params(seed: int = 0):
  return transformer.init_params(
    CONFIG, key=jax.random.key(seed), dtype=jnp.float32
  )


def make_mesh(fsdp: int = 1, sequence: int = 1, tensor: int = 1):
  return meshes.make_trainer_mesh(
    jax.devices()[: fsdp * sequence * tensor],
    fsdp=fsdp,
    sequence=sequence,
    tensor=tensor,
  )


def make_trainer(**changes) -> train_step.Trainer:
  arguments = {
    "config": CONFIG,
    "mesh": make_mesh(),
    "params": make_params(),
    "optimizer": OPTIMIZER,
    "supervised_lr": 1e-2,
    "row_length": 24,
    "rows_per_batch": 4,
    "objective": OBJECTIVE,
    "advantage": ADVANTAGE,
    "critic": None,
    "adapters": None,
    "shaping": SHAPING,
    "recomputes_logprobs": False,
    "max_staleness": 2,
    "temperature": 1.0,
    "compute_dtype": jnp.float32,
    "logprob_chunk": 8,
    "remat": False,
  }
  arguments |= changes
  arguments.setdefault("attention", xla.XlaAttention(mesh=arguments["mesh"]))
  return train_step.Trainer(**arguments)


def make_trajectory(
  rng: np.random.Generator, *, prompt, length, group_id, member, version=0
) -> types.Trajectory:
  return types.Trajectory(
    group_id=group_id,
    member=member,
    version=version,
    token_versions=np.full(length, version, np.int32),
    prompt=prompt,
    completion=rng.integers(1, 16, length).astype(np.int32),
    behavior_logprobs=-rng.uniform(2.0, 3.5, length).astype(np.float32),
    kept_mass=np.ones(length, np.float32),
    finish_reason="stop" if member else "length",
  )


def make_groups(
  num_groups: int = 3, *, group_size: int = 4, seed: int = 0, version: int = 0
) -> list[types.Group]:
  """Groups with prompts, completions and rewards of all kinds."""
  rng = np.random.default_rng(seed)
  groups = []
  for group_id in range(num_groups):
    prompt = rng.integers(1, 16, rng.integers(1, 8)).astype(np.int32)
    trajectories = tuple(
      make_trajectory(
        rng,
        prompt=prompt,
        length=int(rng.integers(1, 12)),
        group_id=group_id,
        member=member,
        version=version,
      )
      for member in range(group_size)
    )
    groups.append(
      types.Group(
        group_id=group_id,
        prompt=types.Prompt(
          prompt_id=group_id, tokens=prompt, text="", answer=""
        ),
        trajectories=trajectories,
        rewards=rng.uniform(size=group_size),
      )
    )
  return groups
