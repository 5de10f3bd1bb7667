"""The pieces of a simulation, each made from its section of the config."""

import functools
import json
import pathlib
from typing import Any

from dora_jax import config as config_lib
from dora_jax.coordinator import balance, coordinator
from dora_jax.coordinator.schedules import base, registry
from dora_jax.simulator import (
  costs,
  faults,
  hardware,
  models,
  roofline,
  workload,
  world,
)
from dora_jax.simulator import generator as generator_lib

Config = Any


def simulate(config: Config) -> dict[str, float]:
  """Runs a config to its end; what it measured, by name.

  Raises:
    ValueError: a field has a value with which nothing could run.
  """
  validate(config)
  made = make_world(config, cost=make_costs(config))
  reason = made.run()
  if reason not in ("finished", "data_exhausted"):
    raise ValueError(
      f"The run ended by {reason!r} after {len(made.record.steps)} steps: "
      "config.faults.events leaves no generator."
    )
  values = made.record.measure(
    num_warmup=config.measure.warmup_steps,
    num_cooldown=config.measure.cooldown_steps,
  )
  return {**values, "events": float(made.num_events)}


def make_world(config: Config, *, cost: costs.Costs) -> world.World:
  """The virtual cluster of a valid config, where all takes what `cost` says."""
  size = models.find(config.model.name)
  generator = config.generator
  capacity = generator.kv_tokens or roofline.kv_capacity(
    size=size,
    accelerator=hardware.find(config.cluster.accelerator),
    generator_devices=generator.devices,
    number_bytes=config.model.number_bytes,
    memory_share=generator.memory_share,
  )
  work = config.workload
  observations = (work.turns - 1) * work.observation_tokens
  longest = work.prompt_tokens + work.max_length + observations
  if longest > capacity:
    raise ValueError(
      f"A request may hold {longest} tokens, but a generator has room for the "
      f"KV of {capacity}: raise config.generator.devices, memory_share or "
      "kv_tokens, or lower config.workload.max_length."
    )
  return world.World(
    coordinator=_make_coordinator(config, size),
    cost=cost,
    work=make_workload(config),
    group_size=config.coordinator.group_size,
    num_generators=num_generators(config),
    make_generator=functools.partial(
      generator_lib.VirtualGenerator,
      cost=cost,
      num_slots=generator.slots,
      kv_capacity=capacity,
      chunk_steps=generator.chunk_steps,
      observation_tokens=work.observation_tokens,
      progress_s=generator.progress_s,
    ),
    tick_s=config.coordinator.balance_period_s,
    is_colocated=config.cluster.colocated,
    befalls=faults.parse(config.faults.events),
  )


def num_generators(config: Config) -> int:
  """Generators at the beginning."""
  cluster = config.cluster
  devices = cluster.devices
  if not cluster.colocated:
    devices -= cluster.trainer_devices
  return devices // config.generator.devices


def make_costs(config: Config) -> costs.Costs:
  """Those of config.cost: measured ones, or the roofline's."""
  cost, cluster = config.cost, config.cluster
  if cost.file:
    text = pathlib.Path(cost.file).read_text()
    return costs.Costs(**json.loads(text)["costs"])
  return roofline.make_costs(
    size=models.find(config.model.name),
    accelerator=hardware.find(cluster.accelerator),
    efficiencies=roofline.Efficiencies(
      bandwidth=cost.bandwidth,
      flops=cost.flops,
      training=cost.training,
      link=cost.link,
      imbalance=cost.imbalance,
      step_fixed_s=cost.step_fixed_s,
      train_fixed_s=cost.train_fixed_s,
      switch_fixed_s=cost.switch_fixed_s,
      move_fixed_s=cost.move_fixed_s,
      message_s=cost.message_s,
    ),
    generator_devices=config.generator.devices,
    trainer_devices=cluster.devices
    if cluster.colocated
    else cluster.trainer_devices,
    number_bytes=config.model.number_bytes,
    num_logprob_passes=cost.logprob_passes,
  )


def validate(config: Config) -> None:
  """Raises ValueError for the first field with which nothing could run."""
  for field, least in _LEAST.items():
    section, name = field.split(".")
    value = config[section][name]
    # Said so that NaN fails too.
    if not value >= least:
      raise ValueError(
        f"config.{field} is {value!r} but must be at least {least}."
      )
  config_lib.rollout_groups(config)
  cluster = config.cluster
  if not cluster.colocated and cluster.trainer_devices >= cluster.devices:
    raise ValueError(
      f"config.cluster.trainer_devices is {cluster.trainer_devices} of "
      f"{cluster.devices} devices, which leaves none to generate: lower it, or "
      "set config.cluster.colocated."
    )
  if num_generators(config) < 1:
    raise ValueError(
      f"config.generator.devices is {config.generator.devices}, more than are "
      "left to generate: lower it or config.cluster.trainer_devices."
    )
  if config.workload.turns > config.workload.max_length:
    raise ValueError(
      f"config.workload.turns is {config.workload.turns} but must be at most "
      "config.workload.max_length: each turn samples a token."
    )


_LEAST = {
  "model.number_bytes": 0.5,
  "cluster.devices": 1,
  "cluster.trainer_devices": 1,
  "generator.devices": 1,
  "generator.slots": 1,
  "generator.chunk_steps": 1,
  "generator.kv_tokens": 0,
  "generator.progress_s": 0.0,
  "workload.sigma": 0.0,
  "workload.max_length": 1,
  "workload.growth": -0.5,
  "workload.prompt_tokens": 1,
  "workload.turns": 1,
  "workload.pause_s": 0.0,
  "workload.pause_sigma": 0.0,
  "workload.observation_tokens": 0,
  "workload.reward_s": 0.0,
  "workload.reward_sigma": 0.0,
  "coordinator.max_staleness": 0,
  "coordinator.prompts_per_batch": 1,
  "coordinator.group_size": 1,
  "coordinator.num_steps": 1,
  "coordinator.oversample": 1,
  "coordinator.balance_period_s": 0.0,
  "measure.warmup_steps": 1,
  "measure.cooldown_steps": 0,
}


def _make_coordinator(
  config: Config, size: models.ModelSize
) -> coordinator.Coordinator:
  options = config.coordinator
  number_bytes = config.model.number_bytes
  return coordinator.Coordinator(
    schedule=registry.create(
      options.schedule,
      base.Options(
        max_staleness=options.max_staleness,
        prompts_per_batch=options.prompts_per_batch,
        rollout_groups=config_lib.rollout_groups(config),
        oversample=options.oversample,
        evict=options.evict,
      ),
    ),
    balance_settings=balance.Settings(
      repartition=options.repartition,
      moves=options.moves,
      filling=options.filling,
      on_step=options.balance_on_step,
      kv_pressure=options.kv_pressure,
      period_s=options.balance_period_s,
      weight_bytes=int(size.num_params * number_bytes),
      kv_token_bytes=int(size.kv_values * number_bytes),
    ),
    group_size=options.group_size,
    prompts_per_batch=options.prompts_per_batch,
    num_steps=options.num_steps,
  )


def make_workload(config: Config) -> workload.Workload:
  """The work of config.workload."""
  work = config.workload
  lengths: workload.Lengths
  if work.lengths_file:
    lengths = workload.read_lengths(
      pathlib.Path(work.lengths_file), seed=config.seed
    )
  else:
    median = workload.median_for_mean(
      mean=work.mean_length, sigma=work.sigma, limit=work.max_length
    )
    lengths = workload.LogNormal(
      median=median, sigma=work.sigma, seed=config.seed
    )
  return workload.Workload(
    lengths=lengths,
    max_length=work.max_length,
    growth=work.growth,
    prompt_tokens=work.prompt_tokens,
    turns=workload.Turns(
      num_turns=work.turns,
      pause_s=work.pause_s,
      pause_sigma=work.pause_sigma,
      observation_tokens=work.observation_tokens,
    ),
    reward_s=work.reward_s,
    reward_sigma=work.reward_sigma,
    seed=config.seed,
  )
