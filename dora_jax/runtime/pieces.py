"""The pieces of a run, each made from its section of the config."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dora_jax import config as config_lib
from dora_jax import interfaces, types
from dora_jax.coordinator import balance, reuse
from dora_jax.coordinator import coordinator as coordinator_lib
from dora_jax.coordinator.schedules import base, registry
from dora_jax.generator import budget, pages
from dora_jax.generator.attention import base as attention_base
from dora_jax.generator.attention import choice
from dora_jax.model import huggingface, transformer
from dora_jax.parallel import axes, meshes
from dora_jax.runtime import canary as canary_lib
from dora_jax.runtime import weight_bytes
from dora_jax.tasks import prompts, sources, templates, tokenizers
from dora_jax.trainer import (
  advantages,
  checks,
  critic,
  lora,
  objective,
  optimizers,
  shaping,
  train_step,
  trained,
)
from dora_jax.trainer.attention import choice as trainer_choice

Config = Any

_CANARY_LENGTH = 16


def make_tokenizer(config: Config) -> interfaces.Tokenizer:
  """The tokenizer of config.tokenizer."""
  return tokenizers.load(
    kind=config.tokenizer.kind,
    alphabet=config.tokenizer.alphabet,
    folder=config.tokenizer.folder,
    stop_ids=tuple(config.tokenizer.stop_ids),
  )


def make_task(
  config: Config, tokenizer: interfaces.Tokenizer
) -> prompts.PromptTask:
  """Prompts of config.task, this process's share of them."""
  task = config.task
  renderer: templates.Renderer = templates.TextTemplate(
    task.template, few_shot=task.few_shot
  )
  if task.chat:
    assert isinstance(renderer, templates.TextTemplate)
    renderer = templates.ChatTemplate(renderer, folder=config.tokenizer.folder)
  load = functools.partial(
    sources.load,
    kind=task.source,
    name=task.name,
    params=task.params.to_dict(),
    columns=task.columns.to_dict(),
    extract=task.extract,
    size=task.size,
    seed=task.seed,
  )
  return prompts.PromptTask(
    source=load(path=task.path),
    heldout_source=load(path=task.heldout_path) if task.heldout_path else None,
    tokenizer=tokenizer,
    renderer=renderer,
    num_heldout=task.num_heldout,
    max_prompt_tokens=task.max_prompt_tokens,
    on_long_prompt=task.on_long_prompt,
    num_epochs=task.num_epochs,
    shuffle=task.shuffle,
    seed=task.seed,
    shard_index=jax.process_index(),
    num_shards=jax.process_count(),
  )


def make_model_config(
  config: Config, tokenizer: interfaces.Tokenizer
) -> transformer.ModelConfig:
  """The model's shape: the folder's, or that of the config's fields."""
  model = config.model
  if model.source == "huggingface":
    shape = huggingface.load_config(model.folder)
    config_lib.check_heads(
      config, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads
    )
    if tokenizer.vocab_size > shape.vocab_size:
      raise ValueError(
        f"The tokenizer has {tokenizer.vocab_size} tokens, but the model of "
        f"{model.folder} knows {shape.vocab_size}: config.tokenizer.folder and "
        "config.model.folder do not belong together."
      )
    return shape
  return transformer.ModelConfig(
    vocab_size=tokenizer.vocab_size,
    width=model.width,
    mlp_width=model.mlp_width,
    num_layers=model.num_layers,
    num_heads=model.num_heads,
    num_kv_heads=model.num_kv_heads,
    head_width=model.head_width,
    rope_theta=model.rope_theta,
    norm_eps=model.norm_eps,
    qk_norm=model.qk_norm,
    qkv_bias=model.qkv_bias,
    tied_head=model.tied_head,
    max_positions=config.generator.max_length,
  )


def make_meshes(config: Config) -> meshes.Meshes:
  """The devices of trainer and generators, by config.mesh."""
  return meshes.split_devices(
    jax.devices(),
    trainer_fsdp=config.mesh.trainer_fsdp,
    trainer_sequence=config.mesh.trainer_sequence,
    trainer_tensor=config.mesh.trainer_tensor,
    num_generators=config.mesh.num_generators,
    generator_tensor=config.mesh.generator_tensor,
    colocated=config.mesh.colocated,
  )


def make_params(
  config: Config, shape: transformer.ModelConfig, mesh: jax.sharding.Mesh
) -> interfaces.Params:
  """The initial params in float32, sharded for training."""
  shardings = axes.shardings(transformer.logical_axes(shape), mesh, axes.TRAIN)
  if config.model.source == "huggingface":
    return huggingface.load_params(
      config.model.folder, shape, dtype=jnp.float32, shardings=shardings
    )
  create = jax.jit(
    lambda key: transformer.init_params(shape, key=key, dtype=jnp.float32),
    out_shardings=shardings,
  )
  return create(jax.random.key(config.seed))


def make_sampling(config: Config) -> types.Sampling:
  """The distribution that training's tokens are drawn from."""
  generator = config.generator
  return types.Sampling(
    temperature=generator.temperature,
    top_k=generator.top_k,
    top_p=generator.top_p,
    min_p=generator.min_p,
  )


def make_stopping(config: Config) -> types.Stopping:
  """What ends completions, in training and in evaluation."""
  generator = config.generator
  return types.Stopping(
    stop_strings=tuple(generator.stop_strings),
    repeated_tokens=generator.repeated_tokens,
    repetitions=generator.repetitions,
  )


def make_optimizer(config: Config) -> optimizers.OptimizerSettings:
  """The optimizer of config.trainer."""
  trainer = config.trainer
  return optimizers.OptimizerSettings(
    kind=trainer.optimizer,
    lr=trainer.lr,
    warmup_steps=trainer.warmup_steps,
    total_steps=config.coordinator.num_steps,
    schedule=trainer.schedule,
    b1=trainer.b1,
    b2=trainer.b2,
    eps=trainer.eps,
    momentum=trainer.momentum,
    weight_decay=trainer.weight_decay,
    clip_norm=trainer.clip_norm,
    average_decay=trainer.ema_decay,
  )


def make_objective(config: Config) -> objective.Objective:
  """The objective of config.trainer.

  Raises:
    ValueError: a name does not exist, or choices do not go together: with each
      other, the schedule's staleness, or how generators sample.
  """
  trainer = config.trainer
  made = objective.Objective(
    constant_length=config.generator.max_new_tokens,
    **{
      field.name: trainer[field.name]
      for field in dataclasses.fields(objective.Objective)
      if field.name != "constant_length"
    },
  )
  schedule = make_schedule(config)
  checks.check_objective(
    made,
    max_staleness=schedule.max_staleness,
    mixes_versions=schedule.mixes_versions,
    recomputes_logprobs=trainer.recompute_logprobs,
    truncates_sampling=_truncates_sampling(config),
  )
  return made


def make_advantage(config: Config) -> advantages.Settings:
  """How config.trainer turns rewards into advantages.

  Raises:
    ValueError: there is no such way, or the groups are too small for it.
  """
  made = advantages.Settings(
    kind=config.trainer.advantage,
    pass_k=config.trainer.pass_k,
    per_version=config.trainer.advantage_per_version,
  )
  advantages.check(made, group_size=config.coordinator.group_size)
  checks.check_advantage(config.trainer.advantage, loss=config.trainer.loss)
  return made


def make_critic(config: Config) -> critic.Settings | None:
  """The critic of config.trainer; None where the advantage needs none."""
  trainer = config.trainer
  if trainer.advantage not in advantages.BY_CRITIC:
    return None
  return critic.Settings(
    kind=trainer.advantage,
    discount=trainer.discount,
    trace_decay=trainer.trace_decay,
    weight_cap=trainer.weight_cap,
    value_clip=trainer.value_clip,
    num_updates=trainer.critic_updates,
    optimizer=dataclasses.replace(
      make_optimizer(config),
      lr=trainer.critic_lr,
      total_steps=config.coordinator.num_steps * trainer.critic_updates,
      average_decay=0.0,
    ),
  )


def make_adapters(config: Config) -> lora.Settings | None:
  """The adapters of config.trainer; None where all params are trained."""
  trainer = config.trainer
  if not trainer.lora_rank:
    return None
  made = lora.Settings(
    rank=trainer.lora_rank,
    alpha=trainer.lora_alpha,
    targets=tuple(trainer.lora_targets),
    seed=config.seed,
  )
  lora.check(made)
  return made


def make_trained(
  config: Config, shape: transformer.ModelConfig
) -> trained.Trained:
  """What the policy's optimizer trains."""
  adapters = make_adapters(config)
  if adapters is None:
    return trained.Policy(shape)
  return lora.Adapters(shape, adapters)


def _truncates_sampling(config: Config) -> bool:
  """Whether generators leave unlikely tokens out."""
  everything = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
  return any(
    config.generator[name] != value for name, value in everything.items()
  )


def make_trainer(
  config: Config,
  shape: transformer.ModelConfig,
  mesh: jax.sharding.Mesh,
  params: interfaces.Params,
) -> train_step.Trainer:
  """The trainer of config.trainer, at version 0."""
  trainer = config.trainer
  return train_step.Trainer(
    config=shape,
    mesh=mesh,
    params=params,
    optimizer=make_optimizer(config),
    supervised_lr=config.cold_start.lr,
    row_length=trainer.row_length,
    rows_per_batch=trainer.rows_per_batch,
    objective=make_objective(config),
    advantage=make_advantage(config),
    critic=make_critic(config),
    adapters=make_adapters(config),
    shaping=shaping.Shaping(
      weights=trainer.reward_weights.to_dict(),
      overlong_penalty=trainer.overlong_penalty,
      overlong_buffer=trainer.overlong_buffer,
      max_length=config.generator.max_new_tokens,
      masks_truncated=trainer.mask_truncated,
    ),
    recomputes_logprobs=trainer.recompute_logprobs,
    max_staleness=make_schedule(config).max_staleness,
    temperature=config.generator.temperature,
    attention=trainer_choice.choose(
      trainer.attention, mesh, config=shape, row_length=trainer.row_length
    ),
    compute_dtype=jnp.dtype(config.model.compute_dtype),
    logprob_chunk=trainer.logprob_chunk,
    remat=trainer.remat,
  )


def choose_chunks_ahead(config: Config, mesh: Mesh) -> int:
  """Chunks that may be under way while the host reads one.

  On a CPU the host computes with the cores of the mesh, so that nothing waits
  for it, and a slot would only be refilled a chunk later.
  """
  chosen = config_lib.chunks_ahead(config)
  if chosen is not None:
    return chosen
  return int(mesh.devices.flat[0].platform != "cpu")


def choose_attention(
  config: Config, shape: transformer.ModelConfig, mesh: Mesh
) -> attention_base.PagedAttention:
  """How a generator mesh attends over pages, by config.generator."""
  return choice.choose(
    config.generator.attention,
    mesh,
    config=shape,
    page_size=config.generator.page_size,
    dtype=kv_dtype(config),
  )


def kv_dtype(config: Config) -> np.dtype:
  """Of the KV pages."""
  generator = config.generator
  is_rounded = generator.kv_dtype == "int8"
  return jnp.dtype("int8" if is_rounded else generator.dtype)


def choose_num_pages(
  config: Config,
  shape: transformer.ModelConfig,
  split: meshes.Meshes,
  mesh_id: int,
  *,
  num_lanes: int,
) -> int:
  """Pages of a generator mesh: config.generator.num_pages, or what fits."""
  generator = config.generator
  if generator.num_pages:
    return generator.num_pages
  mesh = split.generators[mesh_id]
  held = weight_bytes.count(config, make_trained(config, shape))
  # Each lane may hold a version of its own; one more is on its way at times.
  reserved_bytes = held.on_device(
    num_versions=num_lanes + 1, num_devices=mesh.size
  )
  if config.mesh.colocated:
    # The trainer's state is there already; not so its gradients and updates.
    num_params = weight_bytes.count_weights(trained.Policy(shape))
    reserved_bytes += 2 * num_params * 4 // split.trainer.size
  return budget.choose_num_pages(
    memory=budget.measure_memory(
      [list(mesh.devices.flat) for mesh in split.generators], mesh_id
    ),
    share=generator.memory_share,
    reserved_bytes=reserved_bytes,
    bytes_a_page=budget.page_bytes(
      choose_attention(config, shape, mesh),
      shape,
      mesh=mesh,
      page_size=generator.page_size,
      dtype=kv_dtype(config),
    ),
    pages_a_slot=pages.num_pages_for(generator.max_length, generator.page_size),
    num_slots=num_lanes * generator.slots,
  )


def make_schedule(config: Config) -> base.Schedule:
  """The strategy of config.coordinator.

  Raises:
    ValueError: there is no such schedule.
  """
  coordinator = config.coordinator
  return registry.create(
    coordinator.schedule,
    base.Options(
      max_staleness=coordinator.max_staleness,
      prompts_per_batch=coordinator.prompts_per_batch,
      rollout_groups=config_lib.rollout_groups(config),
      oversample=coordinator.oversample,
      evict=coordinator.evict,
    ),
  )


def make_coordinator(
  config: Config, shape: transformer.ModelConfig
) -> coordinator_lib.Coordinator:
  """The state machine of config.coordinator."""
  coordinator = config.coordinator
  itemsize = jnp.dtype(config.generator.dtype).itemsize
  held = weight_bytes.count(config, make_trained(config, shape))
  kv_size = 2 * shape.num_layers * shape.num_kv_heads * shape.head_width
  return coordinator_lib.Coordinator(
    schedule=make_schedule(config),
    balance_settings=balance.Settings(
      repartition=coordinator.repartition,
      moves=coordinator.moves,
      filling=coordinator.filling,
      on_step=coordinator.balance_on_step,
      kv_pressure=coordinator.kv_pressure,
      period_s=coordinator.balance_period_s,
      weight_bytes=held.version,
      kv_token_bytes=kv_size * itemsize,
    ),
    group_size=coordinator.group_size,
    prompts_per_batch=coordinator.prompts_per_batch,
    num_steps=coordinator.num_steps,
    max_filtered=coordinator.filter_patience * coordinator.prompts_per_batch
    if coordinator.filter_groups
    else None,
    reuse=make_reuse(config),
  )


def make_reuse(config: Config) -> reuse.Settings:
  """What config.coordinator has steps take again.

  Raises:
    ValueError: nothing could ever be taken again.
  """
  coordinator = config.coordinator
  if not coordinator.reuse_ratio:
    return reuse.NOTHING
  bound = make_schedule(config).max_staleness
  if not bound or coordinator.max_uses < 2:
    raise ValueError(
      f"config.coordinator.reuse_ratio is {coordinator.reuse_ratio}, but "
      f"trajectories may be {bound} versions old and config.coordinator."
      f"max_uses is {coordinator.max_uses}: what is taken again is 1 version "
      "old at least, so set max_staleness to 1 or more and max_uses to 2 or "
      "more, or reuse_ratio to 0."
    )
  return reuse.Settings(
    groups_per_step=round(
      coordinator.reuse_ratio * coordinator.prompts_per_batch
    ),
    max_uses=coordinator.max_uses,
  )


def make_canary(config: Config, task: prompts.PromptTask) -> canary_lib.Canary:
  """A sequence of real prompt tokens, so that it looks like training's."""
  tokens = task.prompt(0).tokens[:_CANARY_LENGTH]
  if len(tokens) < 2:
    tokens = np.repeat(tokens, 2)
  return canary_lib.Canary(
    tokens=tokens, tolerance_nats=config.runtime.canary_tolerance
  )
