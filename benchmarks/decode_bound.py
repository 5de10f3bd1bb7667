"""What a decode step takes, and what it cannot take less than.

  bound = matmuls alone + bytes of KV in use / bandwidth of a plain copy

The matmuls are those of all layers and of the output head, on as many rows as
there are slots, weights read from memory and lying as in a real step. All is
timed in turn in one run, so that a slower machine slows all of it down.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_jax import types
from dora_jax.generator import engine as engine_lib
from dora_jax.generator import pages
from dora_jax.generator.attention import choice
from dora_jax.model import layer_list, linear, transformer

_PAGE_SIZE = 64
_CHUNK_STEPS = 16
# Large beside any cache.
_COPIED_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
  """One decode step, medians of several.

  Attributes:
    context: tokens that each slot attends to.
    num_slots: slots, all of them live.
    step_s: what a step takes.
    matmul_s: the matmuls alone.
    kv_s: the KV in use over the copy bandwidth.
  """

  context: int
  num_slots: int
  step_s: float
  matmul_s: float
  kv_s: float

  @property
  def bound_s(self) -> float:
    """What a step takes at least."""
    return self.matmul_s + self.kv_s

  @property
  def ratio(self) -> float:
    """How many times its bound a step takes."""
    return self.step_s / self.bound_s


def measure(
  config: transformer.ModelConfig,
  *,
  contexts: Sequence[int],
  num_slots: int,
  num_rounds: int,
) -> list[Reading]:
  """Times decode steps at each context, and their bound, in turn."""
  params = transformer.init_params(config, key=jax.random.key(0))
  matmuls = _matmuls(config, params, num_slots)
  copy = _copy()
  limit = max(contexts) + _CHUNK_STEPS
  steps = {
    context: _decode_step(config, params, context, num_slots, limit)
    for context in contexts
  }
  rounds = [
    (matmuls(), copy(), {at: step() for at, step in steps.items()})
    for _ in range(num_rounds)
  ]
  matmul_s = statistics.median(row[0] for row in rounds)
  copy_s = statistics.median(row[1] for row in rounds)
  # Keys and values, float32.
  token_bytes = 8 * config.num_layers * config.num_kv_heads * config.head_width
  return [
    Reading(
      context=context,
      num_slots=num_slots,
      step_s=statistics.median(row[2][context] for row in rounds),
      matmul_s=matmul_s,
      kv_s=num_slots * context * token_bytes * copy_s / _COPIED_BYTES,
    )
    for context in contexts
  ]


def _matmuls(
  config: transformer.ModelConfig, params: dict, num_slots: int
) -> Callable[[], float]:
  """Times the matmuls of a decode step."""

  layers = layer_list.join(layer_list.unstack(params))["blocks"]

  def layer(hidden_BD, block):
    query_BKGH, key_BKH, value_BKH = linear.products(
      hidden_BD,
      ("BD,DKGH->BKGH", block["query"]),
      ("BD,DKH->BKH", block["key"]),
      ("BD,DKH->BKH", block["value"]),
    )
    out_BD = linear.product("BKGH,KGHD->BD", query_BKGH, block["output"])
    # So that no product is left out.
    out_BD += key_BKH.sum() + value_BKH.sum()
    gate_BF, up_BF = linear.products(
      out_BD, ("BD,DF->BF", block["gate"]), ("BD,DF->BF", block["up"])
    )
    return linear.product("BF,FD->BD", gate_BF * up_BF, block["down"])

  def step(_, hidden_BD):
    for block in layers:
      hidden_BD = layer(hidden_BD, block)
    logits_BV = transformer.unembed(params, config, hidden_BD)
    return hidden_BD * 1e-3 + logits_BV.mean()

  @jax.jit
  def run(hidden_BD):
    return jax.lax.fori_loop(0, _CHUNK_STEPS, step, hidden_BD)

  hidden_BD = jnp.full((num_slots, config.width), 1e-2)
  run(hidden_BD).block_until_ready()

  def timed() -> float:
    start_s = time.perf_counter()
    run(hidden_BD).block_until_ready()
    return (time.perf_counter() - start_s) / _CHUNK_STEPS

  return timed


def _copy() -> Callable[[], float]:
  """Times a copy of _COPIED_BYTES from one place in memory to another."""
  source = np.ones(_COPIED_BYTES, np.uint8)
  target = np.empty_like(source)

  def timed() -> float:
    start_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start_s

  timed()
  return timed


def _decode_step(
  config: transformer.ModelConfig,
  params: dict,
  context: int,
  num_slots: int,
  limit: int,
) -> Callable[[], float]:
  """Times one step of chunks that end at this context."""
  mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
  paged = choice.choose(
    "auto", mesh, config=config, page_size=_PAGE_SIZE, dtype=jnp.float32
  )
  engine = engine_lib.Engine(
    mesh=mesh,
    config=config,
    paged=paged,
    page_size=_PAGE_SIZE,
    max_length=limit,
    prefill_chunk=_PAGE_SIZE,
    chunk_steps=_CHUNK_STEPS,
    stop_ids=(),
    seed=0,
  )
  where = NamedSharding(mesh, PartitionSpec())
  served = engine.serve(0, jax.device_put(params, where))
  num_pages = pages.num_pages_for(limit, _PAGE_SIZE)
  pool = paged.create_pool(
    config,
    mesh=mesh,
    num_pages=1 + num_slots * num_pages,
    page_size=_PAGE_SIZE,
    dtype=jnp.float32,
  )
  state = [pool, engine.create_slots(num_slots)]
  entries = [
    engine_lib.Entry(
      slot=slot,
      page_ids=range(1 + slot * num_pages, 1 + (slot + 1) * num_pages),
      token=1,
      position=max(context - _CHUNK_STEPS, 0),
      last_position=limit,
      sampling=types.Sampling(),
      stop_ids=(),
      draw=(0, slot, 0),
      copied_from=None,
    )
    for slot in range(num_slots)
  ]

  def timed() -> float:
    state[:] = engine.insert(state[0], state[1], entries)
    jax.block_until_ready(state)
    start_s = time.perf_counter()
    state[0], state[1], chunk = engine.decode(
      served, state[0], state[1], enough_ended=num_slots
    )
    jax.block_until_ready(chunk)
    return (time.perf_counter() - start_s) / _CHUNK_STEPS

  timed()
  return timed
