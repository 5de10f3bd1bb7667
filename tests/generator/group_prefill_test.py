"""What a group's prefill costs: the time of one prompt's, whatever its size."""

import statistics
import time

import jax
import jax.numpy as jnp
import pytest

from dora_jax.generator import worker
from dora_jax.generator.attention import xla
from dora_jax.model import transformer
from tests.generator import tiny

_CONFIG = transformer.ModelConfig(
  vocab_size=256,
  width=256,
  mlp_width=768,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_width=64,
  rope_theta=1e4,
  norm_eps=1e-6,
  qk_norm=False,
  qkv_bias=False,
  tied_head=True,
  max_positions=576,
)
_NUM_PAIRS = 15


def _make_lane():
  (lane,) = worker.MeshWorker(
    mesh=tiny.make_mesh(),
    config=_CONFIG,
    paged=xla.XlaAttention(),
    lanes=[(0, 8)],
    page_size=16,
    max_length=576,
    prefill_chunk=512,
    chunk_steps=1,
    chunks_ahead=0,
    stop_ids=(),
    decode_text=tiny.decode_text,
    seed=0,
    dtype=jnp.float32,
  ).lanes
  params = transformer.init_params(_CONFIG, key=jax.random.key(0))
  lane.load(0, jax.device_put(params, tiny.make_mesh().devices.flat[0]))
  return lane


def _prefill_s(lane, group_id: int, num_members: int) -> float:
  """Seconds until all members of a new group could be decoded."""
  prompt = tiny.make_prompt(group_id, 512)
  lane.submit(
    [
      tiny.make_request(group_id, member, prompt=prompt, max_new_tokens=60)
      for member in range(num_members)
    ]
  )
  jax.block_until_ready((lane._pool.kv, lane._slots.on_mesh))
  start_s = time.perf_counter()
  served, version = lane._loaded()
  is_filling = lane._slots.fill(served, lane._roster.line, version, admits=True)
  jax.block_until_ready((lane._pool.kv, lane._slots.on_mesh))
  seconds = time.perf_counter() - start_s
  assert not is_filling and lane._slots.num_running() == num_members
  lane.cancel([(group_id, member) for member in range(num_members)])
  return seconds


@pytest.mark.slow
def test_a_group_of_8_costs_what_one_does():
  lane = _make_lane()
  # Both orders in turn, so that what else the machine does weighs on both.
  ratios, alone_s = [], 0.0
  for pair in range(_NUM_PAIRS + 2):
    sizes = (1, 8) if pair % 2 else (8, 1)
    took = {n: _prefill_s(lane, 10 * pair + n, n) for n in sizes}
    ratios.append(took[8] / took[1])
    alone_s = took[1]
    alone_s = took[1]
  ratio = statistics.median(ratios[2:])
  print(
    f"group of 8 over one, 512 tokens: median {ratio:.3f}, "
    f"{min(ratios[2:]):.3f} to {max(ratios[2:]):.3f}, one "
    f"{alone_s * 1e3:.1f} ms"
  )
  assert ratio <= 1.15
