"""Runs one schedule once, in a process of its own, on the benchmark's work.

  python -m benchmarks.one_run --workdir=DIR --cache=DIR --num_steps=N \
    --overrides='{"coordinator.schedule": "sync"}'

A child of benchmarks.schedules: what a run leaves behind (threads, arrays,
compiled code) ends with the process, and cannot slow the next one.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import shlex
import string
import sys
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

from benchmarks import lengths, pacing
from configs import common
from dora_jax import config as config_lib
from dora_jax import main as main_lib
from dora_jax.runtime import build

PROMPTS_PER_BATCH = 16
GROUP_SIZE = 8
MAX_STALENESS = 3
# Median and sigma of completions whose mean is 0.09 of the longest allowed.
LENGTHS: dict[str, Any] = {"median": 24.0, "sigma": 1.2, "limit": 512}
# All prompts are of one length, so that a step's prompt tokens are known.
PROMPT_TOKENS = 32
# Of paced runs. Training takes 250 decode steps, so that with the lengths above
# a synchronous rollout takes about twice that. A token of a prompt takes a
# twentieth of a decode step: completions here are 50 times shorter than the
# paper's, so a token stands for 50 of theirs.
PACE = pacing.Pace(decode_step_s=2e-3, prefill_token_s=0.1e-3, train_step_s=0.5)
_PACE_PREFIX = "pace."

_DORA = {"coordinator.schedule": "dora"}
_FIXED_RBS = {
  **_DORA,
  "coordinator.rollout_groups": str((MAX_STALENESS + 1) * PROMPTS_PER_BATCH),
}
_QUICK_TRAINER = {f"{_PACE_PREFIX}train_step_s": 0.1}
_FOUR = {
  # With the fixed RBS, for automatic RBS does not fill.
  **_FIXED_RBS,
  **_QUICK_TRAINER,
  "mesh.host_devices": 5,
  "mesh.num_generators": 4,
  "generator.slots": 16,
}
# What can be run: name -> what it changes, "section.field" of the config or
# "pace.field" of PACE.
SETTINGS: dict[str, dict[str, Any]] = {
  "sync": {"coordinator.schedule": "sync"},
  "one_step_off": {"coordinator.schedule": "one_step_off"},
  "partial_rollout": {
    "coordinator.schedule": "partial_rollout",
    "trainer.proximal": "current",
    "trainer.correction": "tis",
  },
  "replication": {"coordinator.schedule": "replication"},
  "dora": _DORA,
  # The paper's RBS fixed at the cap, (K + 1) P groups, where training takes
  # longest, and both where rollout does.
  "dora_fixed_rbs": _FIXED_RBS,
  "dora_quick_trainer": {**_DORA, **_QUICK_TRAINER},
  "dora_fixed_rbs_quick_trainer": {**_FIXED_RBS, **_QUICK_TRAINER},
  # Ablations: dora without one part of Algorithm 1, which needs more generators
  # than live versions to have a choice.
  "dora_4gen": _FOUR,
  "dora_4gen_no_moves": {**_FOUR, "coordinator.moves": False},
  "dora_4gen_no_filling": {**_FOUR, "coordinator.filling": False},
  "dora_4gen_no_repartition": {**_FOUR, "coordinator.repartition": False},
}


def baseline(name: str) -> str | None:
  """The setting of dora with the same devices and pace; None for itself."""
  for dora in ("dora_4gen", "dora_quick_trainer", "dora"):
    same = all(
      SETTINGS[name].get(field) == SETTINGS[dora].get(field)
      for field in ("mesh.num_generators", *_QUICK_TRAINER)
    )
    if same:
      return None if name == dora else dora
  raise ValueError(f"{name} has devices or a pace that dora is not run with.")


def make_config(
  overrides: Mapping[str, Any], *, num_steps: int, seed: int
) -> Any:
  """The benchmark's config: a tiny model, one trainer, two generator meshes.

  Nothing is learned: no random completion repeats a prompt backward, so every
  advantage is 0 and the params stay as they are. A step costs the same.

  Args:
    overrides: "section.field" -> value.
    num_steps: training steps.
    seed: of params, prompts and draws.
  """
  config: Any = common.get_config()
  config.seed = seed
  # Rollout must be most of a step, as in the paper. Training costs what it
  # computes; a decode step on a CPU mostly what it costs to call. So the model
  # is as small as can be: sync then trains for a sixth of its step.
  config.model.width = 16
  config.model.mlp_width = 32
  config.model.num_layers = 1
  config.model.num_heads = 1
  config.model.num_kv_heads = 1
  config.model.head_width = 16
  config.tokenizer.alphabet = ">" + string.digits
  config.task.source = "reversal"
  config.task.params = {
    "alphabet": string.digits,
    "min_length": PROMPT_TOKENS - 1,
    "max_length": PROMPT_TOKENS - 1,
  }
  config.task.size = 4096
  config.task.template = "{question}>"
  config.task.max_prompt_tokens = PROMPT_TOKENS
  config.task.reward_timeout_s = 60.0
  config.mesh.host_devices = 3
  config.mesh.num_generators = 2
  config.generator.slots = 64
  config.generator.page_size = 64
  config.generator.max_length = PROMPT_TOKENS + LENGTHS["limit"]
  config.generator.max_new_tokens = LENGTHS["limit"]
  config.generator.chunk_steps = 8
  config.coordinator.balance_period_s = 0.05
  config.coordinator.max_staleness = MAX_STALENESS
  config.coordinator.prompts_per_batch = PROMPTS_PER_BATCH
  config.coordinator.group_size = GROUP_SIZE
  config.coordinator.num_steps = num_steps
  config.trainer.row_length = config.generator.max_length
  config.trainer.rows_per_batch = 2
  with config.unlocked():
    config.update_from_flattened_dict(
      {
        field: value
        for field, value in overrides.items()
        if not field.startswith(_PACE_PREFIX)
      }
    )
  return config


def make_pace(overrides: Mapping[str, Any]) -> pacing.Pace:
  """PACE, with what the overrides "pace.field" change of it."""
  return dataclasses.replace(
    PACE,
    **{
      field.removeprefix(_PACE_PREFIX): value
      for field, value in overrides.items()
      if field.startswith(_PACE_PREFIX)
    },
  )


def check(overrides: Mapping[str, Any], *, paced: bool) -> None:
  """Raises ValueError where a run with these overrides could not start."""
  if not paced and make_pace(overrides) != PACE:
    raise ValueError(
      f"{dict(overrides)} changes the pace of a run that keeps none: run it "
      "paced (--modes=paced of benchmarks.schedules)."
    )
  config = make_config(overrides, num_steps=1, seed=0)
  config_lib.validate(config, num_devices=config.mesh.host_devices)


def completion_limit(seed: int):
  """(group_id, member) -> tokens at which the completion ends."""
  return functools.partial(lengths.completion_length, seed=seed, **LENGTHS)


def lengths_of_step(step: int, *, seed: int) -> list[int]:
  """Lengths of the groups that a synchronous run trains on in this step."""
  limit = completion_limit(seed)
  first = step * PROMPTS_PER_BATCH
  return [
    limit(group_id, member)
    for group_id in range(first, first + PROMPTS_PER_BATCH)
    for member in range(GROUP_SIZE)
  ]


def use_cache(folder: pathlib.Path) -> None:
  """Keeps whatever is compiled, however small, for the processes to come."""
  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def run(
  config: Any,
  workdir: pathlib.Path,
  *,
  pace: pacing.Pace | None,
  command: str,
) -> None:
  """Runs the config to its end; what it measured is in the workdir."""
  limit = completion_limit(config.seed)
  with build.build(config, workdir, completion_limit=limit) as made:
    if pace is not None:
      pacing.apply(made, pace)
    made.trainer_part.publish()
    reason = made.runtime.run()
    # Promises that some schedules break by design are the parent's to count.
    made.results.summarise(extra={}, command=command)
  if reason != "finished":
    raise RuntimeError(f"The run ended by {reason!r}, not by its last step.")


def main() -> None:
  """Reads the flags and runs."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--workdir", type=pathlib.Path, required=True)
  parser.add_argument("--cache", type=pathlib.Path, required=True)
  parser.add_argument("--overrides", type=json.loads, default={})
  parser.add_argument("--num_steps", type=int, required=True)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument(
    "--paced", action="store_true", help="let devices keep PACE"
  )
  args = parser.parse_args()
  check(args.overrides, paced=args.paced)
  logging.set_verbosity(logging.WARNING)
  config = make_config(args.overrides, num_steps=args.num_steps, seed=args.seed)
  main_lib.prepare_devices(config)
  use_cache(args.cache)
  config_lib.validate(config, num_devices=len(jax.devices()))
  command = shlex.join(["python", "-m", "benchmarks.one_run", *sys.argv[1:]])
  pace = make_pace(args.overrides) if args.paced else None
  run(config, args.workdir, pace=pace, command=command)


if __name__ == "__main__":
  main()
