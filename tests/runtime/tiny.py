"""A run so small that a test can make several of them."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from configs import common
from dora_jax import config as config_lib
from dora_jax import main
from dora_jax.coordinator import coordinator as coordinator_lib
from dora_jax.generator import slot_batch
from dora_jax.runtime import build, executing


def config(**changes: Any):
  """One-digit sums for a one-layer model; `changes` are "section.field"."""
  made: Any = common.get_config()
  made.model.width = 16
  made.model.mlp_width = 32
  made.model.num_layers = 1
  made.model.num_heads = 2
  made.model.num_kv_heads = 1
  made.model.head_width = 8
  made.task.params = {"max_term": 5}
  made.task.template = "{question}="
  made.task.num_heldout = 4
  made.task.max_prompt_tokens = 8
  made.task.reward_timeout_s = 60.0
  made.mesh.num_generators = 2
  made.generator.slots = 4
  made.generator.page_size = 4
  made.generator.max_length = 12
  made.generator.max_new_tokens = 4
  made.generator.chunk_steps = 2
  made.coordinator.max_staleness = 1
  made.coordinator.prompts_per_batch = 2
  made.coordinator.group_size = 4
  made.coordinator.num_steps = 3
  made.trainer.lr = 1e-2
  made.trainer.row_length = 24
  made.trainer.rows_per_batch = 2
  made.trainer.logprob_chunk = 24
  made.evaluation.num_prompts = 4
  made.evaluation.temperature = 1.0
  with made.unlocked():
    made.update_from_flattened_dict(
      {name.replace("__", "."): value for name, value in changes.items()}
    )
  return made


def run(made, workdir: pathlib.Path) -> int:
  """Runs a config in this process; returns the exit status."""
  config_lib.validate(made, num_devices=len(jax.devices()))
  return main.run(made, workdir, command="test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
  """What is left of a run that has ended.

  Attributes:
    reason: why it ended.
    broken: the promises that it broke.
    summary: what it wrote into summary.json.
    params: the trainer's, on the host.
    counters: of each lane but the evaluation's.
    coordinator: as it was at the end.
  """

  reason: str
  broken: Sequence[str]
  summary: dict[str, float]
  params: Any
  counters: Sequence[slot_batch.Counters]
  coordinator: coordinator_lib.Coordinator

  @property
  def num_decoded(self) -> int:
    """Tokens that its generators have sampled for training."""
    return sum(counters.decoded_tokens for counters in self.counters)


def run_and_keep(
  made,
  workdir: pathlib.Path,
  *,
  follow: pathlib.Path | None = None,
  completion_limit: executing.CompletionLimit | None = None,
) -> Ran:
  """Runs a config as `main.run` does, but saves on the way only."""
  config_lib.validate(made, num_devices=len(jax.devices()))
  with build.build(
    made, workdir, follow=follow, completion_limit=completion_limit
  ) as built:
    if built.saver.found is not None:
      built.runtime.resume()
    else:
      built.trainer_part.publish()
    reason = built.runtime.run()
    broken = built.results.summarise(extra={}, command="test")
    params = jax.device_get(built.trainer.params())
  lanes = [lane for each in built.generator_parts for lane in each.worker.lanes]
  evaluation_id = max(lane.generator_id for lane in lanes)
  return Ran(
    reason=reason,
    broken=broken,
    summary=json.loads((workdir / "summary.json").read_text()),
    params=params,
    counters=[
      lane.counters for lane in lanes if lane.generator_id != evaluation_id
    ],
    coordinator=built.runtime._coordinator,
  )


def assert_same_params(left, right) -> None:
  """All arrays of two runs' params are equal, bit for bit."""
  jax.tree.map(np.testing.assert_array_equal, left, right)
