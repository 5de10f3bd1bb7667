"""Our generators, driven alone: each a lane on a CPU device of its own."""

import collections
import time
from collections.abc import Sequence
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_jax import types
from dora_jax.generator import worker as worker_lib
from dora_jax.generator.attention import choice
from dora_jax.model import transformer

PAGE_SIZE = 64
# Decode steps between two looks of the host.
_CHUNK_STEPS = 16
# Prompt tokens between two chunks of decode steps; the default of a config.
_PREFILL_CHUNK = 512
# Requests that wait for a slot of their generator before others wait for any.
_WAITING = 8


class OurGenerators:
  """Continue random prompts to given lengths, side by side.

  Attributes:
    num_params: of the model.
  """

  def __init__(
    self,
    config: transformer.ModelConfig,
    *,
    num_generators: int,
    num_slots: int,
    prompt_tokens: int,
    limit: int,
  ):
    """Loads version 0; generates nothing yet.

    Args:
      config: of the model.
      num_generators: each on a device and a thread of its own, as a run has
        them.
      num_slots: of all generators together; each has its part.
      prompt_tokens: of a prompt.
      limit: most tokens of a completion.
    """
    if num_slots % num_generators:
      raise ValueError(f"{num_slots} slots for {num_generators} generators.")
    params = transformer.init_params(config, key=jax.random.key(0))
    self.num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    self._config = config
    self._num_slots = num_slots // num_generators
    self._prompt_tokens = prompt_tokens
    self._rng = np.random.default_rng(0)
    self._num_groups = 0
    self._workers = [
      self._make_worker(device, params, prompt_tokens + limit)
      for device in jax.devices()[:num_generators]
    ]
    if len(self._workers) < num_generators:
      raise ValueError(
        f"{num_generators} generators need as many devices, but JAX has "
        f"{len(self._workers)}: set jax_num_cpu_devices."
      )

  def _make_worker(self, device, params, max_length) -> worker_lib.MeshWorker:
    """A generator with one lane, at version 0."""
    mesh = Mesh(np.array([device]), ("tensor",))
    worker = worker_lib.MeshWorker(
      mesh=mesh,
      config=self._config,
      paged=choice.choose(
        "auto",
        mesh,
        config=self._config,
        page_size=PAGE_SIZE,
        dtype=jnp.float32,
      ),
      lanes=[(0, self._num_slots)],
      page_size=PAGE_SIZE,
      max_length=max_length,
      prefill_chunk=_PREFILL_CHUNK,
      chunk_steps=_CHUNK_STEPS,
      chunks_ahead=0,
      stop_ids=(),
      seed=0,
      dtype=jnp.float32,
      decode_text=lambda token_ids: str(token_ids),
    )
    where = NamedSharding(mesh, PartitionSpec())
    worker.lanes[0].load(0, jax.device_put(params, where))
    return worker

  def generate(self, lengths: Sequence[int], *, group_size: int = 1) -> float:
    """Makes completions of these lengths; returns seconds.

    Args:
      lengths: of the completions.
      group_size: so many in a row continue one prompt.
    """
    groups = collections.deque(
      self._make_group(lengths[first : first + group_size])
      for first in range(0, len(lengths), group_size)
    )

    def drive(worker: worker_lib.MeshWorker) -> int:
      """Takes groups until there are none; returns the tokens sampled."""
      lane, sampled = worker.lanes[0], 0
      while groups or lane.num_live():
        # Whoever will have a slot first takes the next group, and few more.
        while lane.num_live() < self._num_slots + _WAITING:
          try:
            group = groups.popleft()
          except IndexError:  # Another one has taken the last.
            break
          lane.submit(group)
        for _, finished in worker.step():
          sampled += sum(len(each.completion) for each in finished)
      return sampled

    with futures.ThreadPoolExecutor(len(self._workers)) as pool:
      start_s = time.perf_counter()
      sampled = sum(pool.map(drive, self._workers))
      seconds = time.perf_counter() - start_s
    assert sampled == sum(lengths), (sampled, sum(lengths))
    return seconds

  def _make_group(self, lengths: Sequence[int]) -> list[types.Request]:
    """Requests that continue one prompt to these lengths."""
    prompt = self._rng.integers(
      0, self._config.vocab_size, self._prompt_tokens, np.int32
    )
    self._num_groups += 1
    return [
      types.Request(
        group_id=self._num_groups - 1,
        member=member,
        version=0,
        prompt=prompt,
        max_new_tokens=length,
      )
      for member, length in enumerate(lengths)
    ]
