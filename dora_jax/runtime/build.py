"""From a config to a run that is ready to start: the one place of wiring."""

import contextlib
import dataclasses
import json
import pathlib
import queue
import time
from collections.abc import Sequence
from typing import Any

from dora_jax import checkpoint, interfaces, trace, types
from dora_jax.generator import worker as worker_lib
from dora_jax.model import transformer
from dora_jax.parallel import meshes
from dora_jax.runtime import canary as canary_lib
from dora_jax.runtime import (
  evaluation,
  executing,
  faults,
  following,
  generating,
  local,
  mesh_base,
  orders,
  part,
  pieces,
  publishing,
  record,
  recorder,
  resuming,
  saving,
  scoring,
  served_form,
  training,
  watchdog,
)
from dora_jax.runtime import quarantine as quarantine_lib
from dora_jax.runtime import replicas as replicas_lib
from dora_jax.tasks import (
  prompts,
  reward_pool,
)
from dora_jax.trainer import train_step
from dora_jax.weights import store as store_lib

Config = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """Everything of a run that its entry point touches."""

  runtime: local.LocalRuntime
  trainer: train_step.Trainer
  trainer_part: training.TrainerPart
  generator_parts: Sequence[generating.GeneratorPart]
  task: prompts.PromptTask
  results: recorder.Recorder
  saver: saving.Saver


class CannotBuild(ValueError):
  """What the config names cannot be made into a run: a file, a row, a reward.

  The message of what was met, which is its cause.
  """


@contextlib.contextmanager
def build(
  config: Config,
  workdir: pathlib.Path,
  *,
  follow: pathlib.Path | None = None,
  completion_limit: executing.CompletionLimit | None = None,
):
  """Builds a run; closes its files and processes at the end of the context.

  Args:
    config: as `config.validate` has checked it.
    workdir: made where it is missing; gets the resolved config first.
    follow: a record of events that the run shall repeat.
    completion_limit: the length of each completion, which no stop token cuts
      short: for benchmarks. None gives all config.generator.max_new_tokens at
      most.

  Raises:
    CannotBuild: what the config names cannot be used.
  """
  # Before anything is written, for it may be another run's workdir.
  found = resuming.find(config, workdir)
  gate = None
  if follow is not None:
    num_past = found.extras["num_events"] if found else 0
    gate = following.open_record(config, workdir, follow, num_past=num_past)
  workdir.mkdir(parents=True, exist_ok=True)
  (workdir / "config.json").write_text(
    json.dumps(config.to_dict(), indent=2, default=list) + "\n"
  )
  with contextlib.ExitStack() as stack:
    try:
      made = _build(config, workdir, stack, gate, found, completion_limit)
    except (ValueError, FileNotFoundError, reward_pool.CannotStart) as error:
      raise CannotBuild(str(error)) from error
    yield made


def _build(
  config: Config,
  workdir: pathlib.Path,
  stack: contextlib.ExitStack,
  gate: record.ReplayGate | None,
  found: resuming.Found | None,
  completion_limit: executing.CompletionLimit | None,
) -> Run:
  tokenizer = pieces.make_tokenizer(config)
  task = pieces.make_task(config, tokenizer)
  shape = pieces.make_model_config(config, tokenizer)
  split = pieces.make_meshes(config)
  trainer = pieces.make_trainer(
    config,
    shape,
    split.trainer,
    pieces.make_params(config, shape, split.trainer),
  )
  pool = stack.enter_context(
    reward_pool.RewardPool(
      reward=config.task.reward,
      reward_kwargs=config.task.reward_params.to_dict(),
      num_workers=config.task.reward_workers,
      timeout_s=config.task.reward_timeout_s,
      memory_bytes=int(config.task.reward_memory_gib * 2**30),
      has_network=config.task.reward_network,
      retries=config.task.reward_retries,
    )
  )
  timeline = trace.Trace(workdir / "trace.json")
  stack.callback(timeline.close)
  checkpoints = checkpoint.Checkpoints(
    workdir / resuming.FOLDER,
    max_to_keep=config.checkpoint.max_to_keep,
    keep_every_steps=config.checkpoint.keep_every_steps,
  )
  stack.callback(checkpoints.close)
  inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
  canary = pieces.make_canary(config, task)
  form = served_form.make(config, shape)
  store = form.make_store(split.generators)
  base = form.make_base(split.generators)
  publisher = publishing.Publisher(
    trainer=trainer,
    store=store,
    base=base,
    canary=canary,
    timeline=timeline,
  )
  trainer_part = training.TrainerPart(
    post=inbox.put,
    trainer=trainer,
    publisher=publisher,
    checkpoints=checkpoints,
    publishes_rounded=form.is_rounded,
    timeline=timeline,
  )
  stop_ids, stopping = tokenizer.stop_ids, pieces.make_stopping(config)
  if completion_limit is not None:
    stop_ids, stopping = (), types.Stopping()
  else:
    most = config.generator.max_new_tokens
    completion_limit = lambda group_id, member: most
  workers = _build_workers(config, form.shape, split, stop_ids, tokenizer)
  quarantine = quarantine_lib.Quarantine(workdir)
  parts = _build_parts(
    workers=workers,
    trainer_part=trainer_part,
    reward_part=scoring.RewardPart(
      post=inbox.put, pool=pool, quarantine=quarantine
    ),
    post=inbox.put,
    store=store,
    bases=[
      base
      and mesh_base.MeshBase(base=base, mesh_id=mesh_id, engine=worker.engine)
      for mesh_id, worker in enumerate(workers)
    ],
    canary=canary,
    timeline=timeline,
  )
  generator_parts = list(dict.fromkeys(parts.generators.values()))
  coordinator = pieces.make_coordinator(config, shape)
  events = record.EventWriter(
    workdir / record.FILE_NAME,
    following.header(config),
    num_kept=found.extras["num_events"] if found else None,
  )
  stack.callback(events.close)
  replicas = replicas_lib.Replicas(
    lambda: {each.part: each.work_done() for each in generator_parts},
    now_s=time.monotonic(),
  )
  results = recorder.Recorder(
    workdir=workdir,
    coordinator=coordinator,
    timeline=timeline,
    num_steps=config.coordinator.num_steps,
    decode=tokenizer.decode,
    generators=generator_parts,
    store=store,
    further=lambda: {
      **losses.metrics(),
      **quarantine.metrics(),
      **replicas.metrics(),
    },
  )
  stack.callback(results.close)
  evaluation_part = parts.generators[parts.evaluation_id]
  evaluator = evaluation.Evaluation(
    prompts=task.heldout_prompts()[: config.evaluation.num_prompts],
    samples_per_prompt=config.evaluation.samples_per_prompt,
    # What training cuts off is part of the policy all the same.
    sampling=types.Sampling(temperature=config.evaluation.temperature),
    stopping=stopping,
    max_new_tokens=config.generator.max_new_tokens,
    solved_reward=config.evaluation.solved_reward,
    store=store,
    mesh_id=0,
    load=lambda version: evaluation_part.send(
      orders.LoadOrder(generator_id=parts.evaluation_id, version=version)
    ),
    submit=lambda requests: evaluation_part.send(
      orders.SubmitOrder(generator_id=parts.evaluation_id, requests=requests)
    ),
    unload=lambda: evaluation_part.send(
      orders.UnloadOrder(generator_id=parts.evaluation_id)
    ),
  )
  executor = executing.Executor(
    task=task,
    tokenizer=tokenizer,
    parts=parts,
    store=store,
    sampling=pieces.make_sampling(config),
    stopping=stopping,
    completion_limit=completion_limit,
  )
  losses = faults.Losses(
    parts=parts, executor=executor, store=store, evaluator=evaluator
  )
  saver = saving.Saver(
    found=found,
    every_steps=config.checkpoint.every_steps,
    config=following.header(config),
    coordinator=coordinator,
    task=task,
    executor=executor,
    evaluator=evaluator,
    results=results,
    events=events,
    store=store,
    canary=canary,
    trainer=trainer,
    trainer_part=trainer_part,
    publisher=publisher,
    checkpoints=checkpoints,
  )
  runtime = local.LocalRuntime(
    coordinator=coordinator,
    task=task,
    parts=parts,
    executor=executor,
    inbox=inbox,
    evaluator=evaluator,
    evaluate_every_steps=config.evaluation.every_steps,
    results=results,
    saver=saver,
    events=events,
    gate=gate,
    watchdog=watchdog.Watchdog(
      coordinator=coordinator,
      parts=parts.all(),
      moves=lambda: executor.moves,
      workdir=workdir,
      stall_s=config.runtime.stall_s,
      give_up_s=config.runtime.give_up_s,
    ),
    losses=losses,
    replicas=replicas,
    solved_reward=config.evaluation.solved_reward,
    tick_s=config.coordinator.balance_period_s,
  )
  return Run(
    runtime=runtime,
    trainer=trainer,
    trainer_part=trainer_part,
    generator_parts=generator_parts,
    task=task,
    results=results,
    saver=saver,
  )


def _build_workers(
  config: Config,
  shape: transformer.ModelConfig,
  split: meshes.Meshes,
  stop_ids: Sequence[int],
  tokenizer: interfaces.Tokenizer,
) -> list[worker_lib.MeshWorker]:
  """One worker a generator mesh; the first has the evaluation's lane too."""
  generator = config.generator
  num_lanes = config.mesh.lanes
  ids_of = [
    list(range(mesh_id * num_lanes, (mesh_id + 1) * num_lanes))
    for mesh_id in range(len(split.generators))
  ]
  ids_of[0].append(len(split.generators) * num_lanes)
  # All before the first pool, for meshes may share devices.
  num_pages = [
    pieces.choose_num_pages(config, shape, split, mesh_id, num_lanes=len(ids))
    for mesh_id, ids in enumerate(ids_of)
  ]
  workers = []
  for mesh_id, mesh in enumerate(split.generators):
    workers.append(
      worker_lib.MeshWorker(
        mesh=mesh,
        config=shape,
        paged=pieces.choose_attention(config, shape, mesh),
        lanes=[
          (generator_id, generator.slots) for generator_id in ids_of[mesh_id]
        ],
        page_size=generator.page_size,
        num_pages=num_pages[mesh_id],
        max_length=generator.max_length,
        prefill_chunk=generator.prefill_chunk,
        chunk_steps=generator.chunk_steps,
        chunks_ahead=pieces.choose_chunks_ahead(config, mesh),
        stop_ids=stop_ids,
        decode_text=tokenizer.decode,
        seed=config.seed,
        dtype=pieces.kv_dtype(config),
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
  bases: Sequence[mesh_base.MeshBase | None],
  canary: canary_lib.Canary,
  timeline: trace.Trace,
) -> executing.Parts:
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
      base=bases[mesh_id],
      canary=canary,
      timeline=timeline,
    )
    for mesh_id, worker in enumerate(workers)
  ]
  return executing.Parts(
    trainer=trainer_part,
    rewards=reward_part,
    generators={g: generator_parts[m] for g, (m, _) in lanes.items()},
    names=names,
    mesh_ids={g: mesh_id for g, (mesh_id, _) in lanes.items()},
    kv_capacity={
      mesh_id: worker.num_pages * worker.engine.page_size
      for mesh_id, worker in enumerate(workers)
    },
    num_slots={
      g: lane.num_slots for g, (_, lane) in lanes.items() if g != evaluation_id
    },
    evaluation_id=evaluation_id,
  )
