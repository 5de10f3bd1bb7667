"""From a config to a run that is ready to start: the one place of wiring."""

import contextlib
import dataclasses
import json
import pathlib
import queue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax import checkpoint, interfaces, trace
from dora_jax import config as config_lib
from dora_jax.coordinator import coordinator as coordinator_lib
from dora_jax.coordinator.schedules import registry
from dora_jax.generator import worker as worker_lib
from dora_jax.model import huggingface, transformer
from dora_jax.parallel import axes, meshes
from dora_jax.runtime import (
  canary as canary_lib,
)
from dora_jax.runtime import (
  evaluation,
  generating,
  local,
  part,
  recorder,
  scoring,
  training,
)
from dora_jax.tasks import (
  prompts,
  reward_pool,
  sources,
  templates,
  tokenizers,
)
from dora_jax.trainer import train_state, train_step
from dora_jax.weights import store as store_lib

Config = Any

_CANARY_LENGTH = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """Everything of a run that its entry point touches."""

  runtime: local.LocalRuntime
  trainer: train_step.Trainer
  trainer_part: training.TrainerPart
  task: prompts.PromptTask
  record: recorder.Recorder


def build_tokenizer(config: Config) -> interfaces.Tokenizer:
  """The tokenizer of config.tokenizer."""
  return tokenizers.load(
    kind=config.tokenizer.kind,
    alphabet=config.tokenizer.alphabet,
    folder=config.tokenizer.folder,
    stop_ids=tuple(config.tokenizer.stop_ids),
  )


def build_task(
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
  source = sources.load(
    kind=task.source,
    name=task.name,
    params=task.params.to_dict(),
    path=task.path,
    columns=task.columns.to_dict(),
    extract=task.extract,
    size=task.size,
    seed=task.seed,
  )
  return prompts.PromptTask(
    source=source,
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


def build_model_config(
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


def build_params(
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


def build_optimizer(config: Config) -> train_state.OptimizerSettings:
  """The optimizer of config.trainer."""
  trainer = config.trainer
  return train_state.OptimizerSettings(
    lr=trainer.lr,
    warmup_steps=trainer.warmup_steps,
    total_steps=config.coordinator.num_steps,
    schedule=trainer.schedule,
    b1=trainer.b1,
    b2=trainer.b2,
    eps=trainer.eps,
    weight_decay=trainer.weight_decay,
    clip_norm=trainer.clip_norm,
  )


def build_trainer(
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
    optimizer=build_optimizer(config),
    supervised_lr=config.cold_start.lr,
    row_length=trainer.row_length,
    rows_per_batch=trainer.rows_per_batch,
    clip_low=trainer.clip_low,
    clip_high=trainer.clip_high,
    temperature=config.generator.temperature,
    compute_dtype=jnp.dtype(config.model.compute_dtype),
    logprob_chunk=trainer.logprob_chunk,
    remat=trainer.remat,
  )


def build_coordinator(config: Config) -> coordinator_lib.Coordinator:
  """The state machine with the schedule of config.coordinator."""
  coordinator = config.coordinator
  schedule = registry.create(
    coordinator.schedule,
    max_staleness=coordinator.max_staleness,
    prompts_per_batch=coordinator.prompts_per_batch,
    rollout_groups=config_lib.rollout_groups(config),
  )
  return coordinator_lib.Coordinator(
    schedule=schedule,
    group_size=coordinator.group_size,
    prompts_per_batch=coordinator.prompts_per_batch,
    num_steps=coordinator.num_steps,
  )


def build_canary(config: Config, task: prompts.PromptTask) -> canary_lib.Canary:
  """A sequence of real prompt tokens, so that it looks like training's."""
  tokens = task.prompt(0).tokens[:_CANARY_LENGTH]
  if len(tokens) < 2:
    tokens = np.repeat(tokens, 2)
  return canary_lib.Canary(
    tokens=tokens, tolerance_nats=config.runtime.canary_tolerance
  )


@contextlib.contextmanager
def build(config: Config, workdir: pathlib.Path):
  """Builds a run; closes its files and processes at the end of the context.

  Args:
    config: as `config.validate` has checked it.
    workdir: made where it is missing; gets the resolved config first.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  (workdir / "config.json").write_text(
    json.dumps(config.to_dict(), indent=2, default=list) + "\n"
  )
  with contextlib.ExitStack() as stack:
    yield _build(config, workdir, stack)


def _build(
  config: Config, workdir: pathlib.Path, stack: contextlib.ExitStack
) -> Run:
  tokenizer = build_tokenizer(config)
  task = build_task(config, tokenizer)
  shape = build_model_config(config, tokenizer)
  split = meshes.split_devices(
    jax.devices(),
    trainer_fsdp=config.mesh.trainer_fsdp,
    trainer_tensor=config.mesh.trainer_tensor,
    num_generators=config.mesh.num_generators,
    generator_tensor=config.mesh.generator_tensor,
    colocated=config.mesh.colocated,
  )
  trainer = build_trainer(
    config, shape, split.trainer, build_params(config, shape, split.trainer)
  )
  pool = stack.enter_context(
    reward_pool.RewardPool(
      reward=config.task.reward,
      reward_kwargs=config.task.reward_params.to_dict(),
      num_workers=config.task.reward_workers,
      timeout_s=config.task.reward_timeout_s,
    )
  )
  timeline = trace.Trace(workdir / "trace.json")
  stack.callback(timeline.close)
  checkpoints = checkpoint.Checkpoints(
    workdir / "checkpoints", max_to_keep=config.checkpoint.max_to_keep
  )
  stack.callback(checkpoints.close)
  inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
  canary = build_canary(config, task)
  store = store_lib.WeightStore(
    shardings={
      mesh_id: axes.shardings(
        transformer.logical_axes(shape), mesh, axes.DECODE
      )
      for mesh_id, mesh in enumerate(split.generators)
    },
    dtype=jnp.dtype(config.generator.dtype),
  )
  trainer_part = training.TrainerPart(
    post=inbox.put,
    trainer=trainer,
    store=store,
    canary=canary,
    checkpoints=checkpoints,
    save_every_steps=config.checkpoint.every_steps,
    timeline=timeline,
  )
  workers = _build_workers(config, shape, split, tokenizer)
  parts = _build_parts(
    workers=workers,
    trainer_part=trainer_part,
    reward_part=scoring.RewardPart(post=inbox.put, pool=pool),
    post=inbox.put,
    store=store,
    canary=canary,
    timeline=timeline,
  )
  coordinator = build_coordinator(config)
  record = recorder.Recorder(
    workdir=workdir,
    coordinator=coordinator,
    timeline=timeline,
    num_steps=config.coordinator.num_steps,
    max_staleness=config.coordinator.max_staleness,
    decode=tokenizer.decode,
    generator_busy_s=lambda: sum(
      p.busy_s for p in dict.fromkeys(parts.generators.values())
    ),
    num_generator_meshes=len(split.generators),
  )
  stack.callback(record.close)
  evaluation_part = parts.generators[parts.evaluation_id]
  evaluator = evaluation.Evaluation(
    prompts=task.heldout_prompts()[: config.evaluation.num_prompts],
    samples_per_prompt=config.evaluation.samples_per_prompt,
    temperature=config.evaluation.temperature,
    max_new_tokens=config.generator.max_new_tokens,
    solved_reward=config.evaluation.solved_reward,
    store=store,
    mesh_id=0,
    load=lambda version: evaluation_part.send(
      generating.LoadOrder(generator_id=parts.evaluation_id, version=version)
    ),
    submit=lambda requests: evaluation_part.send(
      generating.SubmitOrder(
        generator_id=parts.evaluation_id, requests=requests
      )
    ),
    unload=lambda: evaluation_part.send(
      generating.UnloadOrder(generator_id=parts.evaluation_id)
    ),
  )
  runtime = local.LocalRuntime(
    coordinator=coordinator,
    task=task,
    tokenizer=tokenizer,
    parts=parts,
    inbox=inbox,
    store=store,
    evaluator=evaluator,
    evaluate_every_steps=config.evaluation.every_steps,
    record=record,
    workdir=workdir,
    temperature=config.generator.temperature,
    max_new_tokens=config.generator.max_new_tokens,
    stall_s=config.runtime.stall_s,
  )
  return Run(
    runtime=runtime,
    trainer=trainer,
    trainer_part=trainer_part,
    task=task,
    record=record,
  )


def _build_workers(
  config: Config,
  shape: transformer.ModelConfig,
  split: meshes.Meshes,
  tokenizer: interfaces.Tokenizer,
) -> list[worker_lib.MeshWorker]:
  """One worker a generator mesh; the first has the evaluation's lane too."""
  generator = config.generator
  num_lanes = config.mesh.lanes
  workers = []
  for mesh_id, mesh in enumerate(split.generators):
    ids = list(range(mesh_id * num_lanes, (mesh_id + 1) * num_lanes))
    if mesh_id == 0:
      ids.append(len(split.generators) * num_lanes)
    workers.append(
      worker_lib.MeshWorker(
        mesh=mesh,
        config=shape,
        lanes=[(generator_id, generator.slots) for generator_id in ids],
        page_size=generator.page_size,
        num_pages=generator.num_pages or None,
        max_length=generator.max_length,
        chunk_steps=generator.chunk_steps,
        stop_ids=tokenizer.stop_ids,
        seed=config.seed,
        dtype=jnp.dtype(generator.dtype),
      )
    )
  return workers


def _build_parts(
  *,
  workers: list[worker_lib.MeshWorker],
  trainer_part: training.TrainerPart,
  reward_part: scoring.RewardPart,
  post: part.Post,
  store: store_lib.WeightStore,
  canary: canary_lib.Canary,
  timeline: trace.Trace,
) -> local.Parts:
  """Threads for everything; the last lane of the first mesh is evaluation's."""
  evaluation_id = workers[0].lanes[-1].generator_id
  lanes = {
    lane.generator_id: (mesh_id, lane)
    for mesh_id, worker in enumerate(workers)
    for lane in worker.lanes
  }
  names = {
    generator_id: evaluation.HOLDER
    if generator_id == evaluation_id
    else f"generator {generator_id}"
    for generator_id in sorted(lanes)
  }
  generator_parts = [
    generating.GeneratorPart(
      post=post,
      mesh_id=mesh_id,
      worker=worker,
      names=names,
      store=store,
      canary=canary,
      timeline=timeline,
    )
    for mesh_id, worker in enumerate(workers)
  ]
  return local.Parts(
    trainer=trainer_part,
    rewards=reward_part,
    generators={g: generator_parts[m] for g, (m, _) in lanes.items()},
    names=names,
    mesh_ids={g: mesh_id for g, (mesh_id, _) in lanes.items()},
    num_slots={
      g: lane.num_slots for g, (_, lane) in lanes.items() if g != evaluation_id
    },
    evaluation_id=evaluation_id,
  )
