"""benchmarks.schedules on this machine: predicted from its sync run alone.

  source    python -m benchmarks.schedules --out=OUT --modes=paced, and
            python -m dora_jax.simulate --workdir=DIR \
              --calibrate=OUT/paced/round0/sync
  command   python -m dora_jax.simulate \
              --config=configs/sim/benchmark_here.py:DIR/costs.json,OUT
  time      5 s
  result    tokens/s, predicted and measured: sync 7,196, 7,227; one_step_off
            11,289, 11,200; replication 8,547, 8,760; partial_rollout 19,260,
            17,881, with lag 1.73, 1.87; dora 19,950, 20,085, with lag 1.93,
            1.93 (2 CPU cores)

Costs and lengths are those of the sync run. What the other four measured is
read from OUT/summary.json only to be printed beside the predictions.
"""

import json
import pathlib

from configs.sim import common

_SCHEDULES = (
  "sync",
  "one_step_off",
  "partial_rollout",
  "replication",
  "dora",
)
_MEASURES = ("tokens_per_s", "lag_mean")


def get_config(measured: str = ""):
  """Returns the config with the five schedules as cases.

  Args:
    measured: the path of a costs.json and, after a comma, the folder of a
      benchmark to compare with, its paced mode unless that is followed by
      another comma and "shared".
  """
  config = common.get_config()
  config.model.name = "tiny"
  config.cluster.accelerator = "cpu"
  config.cluster.devices = 3
  config.cluster.trainer_devices = 1
  config.generator.slots = 64
  config.generator.chunk_steps = 8
  # As the benchmark has it: enough pages for every slot.
  config.generator.kv_tokens = 64 * 544
  config.generator.progress_s = 0.5
  # Of the benchmark's lengths; those of the run are read where it is given.
  config.workload.mean_length = 48.0
  config.workload.sigma = 1.2
  config.workload.max_length = 512
  config.workload.prompt_tokens = 32
  config.coordinator.max_staleness = 3
  config.coordinator.prompts_per_batch = 16
  config.coordinator.group_size = 8
  config.coordinator.oversample = 1.25
  config.coordinator.num_steps = 34
  config.coordinator.balance_period_s = 0.05
  config.measure.warmup_steps = 10
  config.measure.cooldown_steps = 4
  config.measure.where = "here"
  config.measure.error_of = "tokens_per_s"
  for name in _SCHEDULES:
    config.cases[name] = {"coordinator": {"schedule": name}}
  costs, _, rest = measured.partition(",")
  if costs:
    found = json.loads(pathlib.Path(costs).read_text())
    config.cost.file = costs
    config.workload.lengths_file = costs
    config.workload.reward_s = found["reward_s"]
    config.workload.prompt_tokens = found["prompt_tokens"]
  folder, _, mode = rest.partition(",")
  if folder:
    _compare(config, pathlib.Path(folder), mode or "paced")
  return config


def _compare(config, folder: pathlib.Path, mode: str) -> None:
  """Sets beside each case what the benchmark measured of it."""
  prefix = "" if mode == "shared" else f"{mode}/"
  values = json.loads((folder / "summary.json").read_text())
  for name in _SCHEDULES:
    if f"{prefix}tokens_per_s/{name}" in values:
      config.published[name] = {
        measure: values[f"{prefix}{measure}/{name}"] for measure in _MEASURES
      }
