"""On the device itself, in bf16: `pytest -m accelerator`, nothing beside it."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax import types
from dora_jax.generator import engine as engine_lib
from dora_jax.generator import kv_pool
from dora_jax.generator.attention import choice, gpu, xla
from dora_jax.model import transformer
from dora_jax.parallel import axes
from tests.generator.attention import paged

pytestmark = [
  pytest.mark.accelerator,
  pytest.mark.skipif(
    jax.default_backend() == "cpu",
    reason="there is no accelerator, or -m accelerator was not given",
  ),
]
_PAGE_SIZE = 64


def _make_mesh():
  return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))


def _choose(mesh, config):
  return choice.choose(
    "auto", mesh, config=config, page_size=_PAGE_SIZE, dtype=jnp.bfloat16
  )


def test_the_kernel_gives_what_xla_gives():
  mesh, config = _make_mesh(), paged.make_config(num_queries=7)
  ours = _choose(mesh, config)
  assert ours.name == jax.default_backend()
  settings = {"page_size": _PAGE_SIZE, "dtype": jnp.bfloat16}
  found, _ = paged.answer(ours, mesh, config, **settings)
  expected, _ = paged.answer(xla.XlaAttention(), mesh, config, **settings)
  for one, other in zip(found, expected, strict=True):
    # bf16 keeps 8 bits; the outputs are below 4.
    np.testing.assert_allclose(one, other, atol=2**-6, rtol=0)


@pytest.mark.skipif(
  jax.default_backend() != "gpu", reason="only GPUs have two ways to prefill"
)
def test_both_ways_to_prefill_give_the_same(capsys):
  mesh, config = _make_mesh(), paged.make_config(num_queries=7)
  num_rows, num_tokens, num_columns = 4, 64, 64
  tokens = paged.draw_tokens(config, 0, num_rows, num_tokens, jnp.bfloat16)
  table_RC = np.arange(1, 1 + num_rows * num_columns, dtype=np.int32)
  table_RC = table_RC.reshape(num_rows, num_columns)
  # The last blocks of four prompts of 4,096 tokens.
  start_R = np.full(num_rows, (num_columns - 1) * _PAGE_SIZE, np.int32)
  outputs = []
  for way in ("cudnn", "kernel"):
    ours = gpu.GpuAttention(mesh=mesh, prefills_by=way)
    pool = ours.create_pool(
      config,
      mesh=mesh,
      num_pages=1 + table_RC.size,
      page_size=_PAGE_SIZE,
      dtype=jnp.bfloat16,
    )
    noise = jax.random.normal(jax.random.key(0), pool.keys.shape, jnp.bfloat16)
    pool = kv_pool.KvPool(keys=noise, values=noise)
    fill = lambda ours=ours, pool=pool: jax.block_until_ready(
      paged.prefill(ours, pool, tokens, start_R, table_RC, table_RC[:, -1:])
    )
    fill()
    start_s = time.perf_counter()
    out_RTKGH, _ = fill()
    micros = 1e6 * (time.perf_counter() - start_s)
    outputs.append(np.asarray(out_RTKGH, np.float32))
    with capsys.disabled():
      print(f"\n{way}: {micros:.0f} us for {num_rows * num_tokens} tokens")
  np.testing.assert_allclose(*outputs, atol=2**-6, rtol=0)


def test_decoding_comes_close_to_reading_the_weights(capsys):
  # The shape of Qwen2.5-1.5B.
  config = transformer.ModelConfig(
    vocab_size=151936,
    width=1536,
    mlp_width=8960,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_width=128,
    rope_theta=1e6,
    norm_eps=1e-6,
    qk_norm=False,
    qkv_bias=True,
    tied_head=True,
    max_positions=4096,
  )
  num_slots, num_steps, length = 64, 64, 1024
  mesh = _make_mesh()
  names = transformer.logical_axes(config)
  params = jax.device_put(
    transformer.init_params(config, key=jax.random.key(0), dtype=jnp.bfloat16),
    axes.shardings(names, mesh, axes.DECODE),
  )
  weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  bandwidth = _measure_bandwidth()
  for ours in (_choose(mesh, config), xla.XlaAttention()):
    step_s = _time_step(
      ours, mesh, config, params, num_slots, num_steps, length
    )
    with capsys.disabled():
      print(
        f"\n{ours.name}: {num_slots / step_s:.0f} tokens/s, a step "
        f"{1e3 * step_s:.2f} ms; weight bytes / bandwidth "
        f"{1e3 * weight_bytes / bandwidth:.2f} ms "
        f"({weight_bytes / 1e9:.2f} GB at {bandwidth / 1e9:.0f} GB/s)"
      )
    assert step_s > weight_bytes / bandwidth / 2  # else it did not run


def _time_step(
  ours, mesh, config, params, num_slots, num_steps, length
) -> float:
  """Seconds of a decode step of slots that all have so many tokens."""
  engine = engine_lib.Engine(
    mesh=mesh,
    config=config,
    paged=ours,
    page_size=_PAGE_SIZE,
    max_length=2 * length,
    prefill_chunk=512,
    chunk_steps=num_steps,
    stop_ids=(),
    seed=0,
  )
  num_pages = 2 * length // _PAGE_SIZE
  pool = ours.create_pool(
    config,
    mesh=mesh,
    num_pages=1 + num_slots * num_pages,
    page_size=_PAGE_SIZE,
    dtype=jnp.bfloat16,
  )
  entries = [
    engine_lib.Entry(
      slot=slot,
      page_ids=range(1 + slot * num_pages, 1 + (slot + 1) * num_pages),
      token=5,
      position=length,
      last_position=2 * length - 1,
      sampling=types.Sampling(temperature=1.0),
      stop_ids=(),
      draw=(0, slot, 0),
      copied_from=None,
    )
    for slot in range(num_slots)
  ]
  served = engine.serve(0, params)
  pool, slots = engine.insert(pool, engine.create_slots(num_slots), entries)
  times_s = []
  for _ in range(4):
    start_s = time.perf_counter()
    pool, slots, chunk = engine.decode(
      served, pool, slots, enough_ended=len(entries)
    )
    jax.block_until_ready(chunk)
    times_s.append((time.perf_counter() - start_s) / num_steps)
  return min(times_s[1:])


def _measure_bandwidth() -> float:
  """Bytes a second that the device reads and writes in a copy."""
  source = jnp.zeros(2**29, jnp.bfloat16)
  copy = jax.jit(lambda array: array + 1)
  done = jax.block_until_ready(copy(source))
  start_s = time.perf_counter()
  for _ in range(10):
    done = copy(source)
  jax.block_until_ready(done)
  return 10 * 2 * source.nbytes / (time.perf_counter() - start_s)
