"""Our generator, driven alone: a lane on one CPU device."""

import time
from collections.abc import Sequence

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


class OurGenerator:
  """Continues random prompts to given lengths.

  Attributes:
    num_params: of the model.
  """

  def __init__(
    self,
    config: transformer.ModelConfig,
    *,
    num_slots: int,
    prompt_tokens: int,
    limit: int,
    chunks_ahead: int = 0,
  ):
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    params = transformer.init_params(config, key=jax.random.key(0))
    self.num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    self._config = config
    self._prompt_tokens = prompt_tokens
    self._rng = np.random.default_rng(0)
    self._num_groups = 0
    self._worker = worker_lib.MeshWorker(
      mesh=mesh,
      config=config,
      paged=choice.choose(
        "auto", mesh, config=config, page_size=PAGE_SIZE, dtype=jnp.float32
      ),
      lanes=[(0, num_slots)],
      page_size=PAGE_SIZE,
      max_length=prompt_tokens + limit,
      prefill_chunk=_PREFILL_CHUNK,
      chunk_steps=_CHUNK_STEPS,
      chunks_ahead=chunks_ahead,
      stop_ids=(),
      seed=0,
      dtype=jnp.float32,
      decode_text=lambda token_ids: str(token_ids),
    )
    where = NamedSharding(mesh, PartitionSpec())
    self._worker.lanes[0].load(0, jax.device_put(params, where))

  def generate(self, lengths: Sequence[int], *, group_size: int = 1) -> float:
    """Makes completions of these lengths; returns seconds.

    Args:
      lengths: of the completions.
      group_size: so many in a row continue one prompt.
    """
    requests = []
    for first in range(0, len(lengths), group_size):
      prompt = self._rng.integers(
        0, self._config.vocab_size, self._prompt_tokens, np.int32
      )
      requests += [
        types.Request(
          group_id=self._num_groups,
          member=member,
          version=0,
          prompt=prompt,
          max_new_tokens=length,
        )
        for member, length in enumerate(lengths[first : first + group_size])
      ]
      self._num_groups += 1
    lane = self._worker.lanes[0]
    start_s = time.perf_counter()
    lane.submit(requests)
    sampled = 0
    while lane.num_live():
      for _, finished in self._worker.step():
        sampled += sum(len(each.completion) for each in finished)
    seconds = time.perf_counter() - start_s
    assert sampled == sum(lengths), (sampled, sum(lengths))
    return seconds
