"""Params in a generator's own form, against the model as the trainer has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.model import int8, kv_heads, transformer
from dora_jax.parallel import axes
from dora_jax.weights import store as store_lib
from tests.generator import tiny


def _expand(params):
  """Rounded params as arrays again."""
  one_layer = jax.vmap(int8.dequantize)
  return params | {"blocks": one_layer(params["blocks"])}


def _serve(params, config, tensor, logical_axes):
  """What a lane of so many devices samples with these params."""
  mesh = tiny.make_mesh(tensor)
  lane = tiny.make_worker(config=config, tensor=tensor).lanes[0]
  shardings = axes.shardings(logical_axes, mesh, axes.DECODE)
  lane.load(0, jax.device_put(params, shardings))
  requests = [tiny.make_request(group, length=9) for group in range(3)]
  return requests, tiny.run(lane, requests)


def test_repeated_kv_heads_change_nothing_on_more_devices_than_heads():
  copies = kv_heads.count_copies(tiny.CONFIG.num_kv_heads, 4)
  assert copies == 2
  config = kv_heads.repeat_in_config(tiny.CONFIG, copies)
  params = kv_heads.repeat(tiny.make_params(0), copies)
  requests, found = _serve(params, config, 4, transformer.logical_axes(config))
  tiny.assert_close(found, [tiny.generate_slowly(r) for r in requests])


@pytest.mark.parametrize(
  ("num_kv_heads", "num_devices", "copies"),
  [(2, 1, 1), (2, 2, 1), (8, 4, 1), (2, 4, 2), (4, 6, 3), (1, 8, 8)],
)
def test_as_few_copies_as_devices_divide(num_kv_heads, num_devices, copies):
  assert kv_heads.count_copies(num_kv_heads, num_devices) == copies
  assert num_kv_heads * copies % num_devices == 0


def test_int8_rounds_each_output_channel_by_its_largest():
  params = transformer.init_params(tiny.CONFIG, key=jax.random.key(3))
  down_LFD = np.zeros(params["blocks"]["down"].shape, np.float32)
  down_LFD[1, :3, 0] = [1.27, -0.314, 0.004]
  down_LFD[1, :2, 1] = [0.0254, -0.0127]
  params["blocks"]["down"] = jnp.asarray(down_LFD)
  rounded = int8.quantize(params)
  down = rounded["blocks"]["down"]
  assert down.values[1, :3, 0].tolist() == [127, -31, 0]
  assert down.values[1, :2, 1].tolist() == [127, -64]  # -63.5: to even
  np.testing.assert_allclose(down.scale[1, :3], [0.01, 0.0002, 0], rtol=1e-6)
  for name in ("embed", "head", "final_norm"):
    assert rounded[name] is params[name]
  # Nothing is off by more than half a step, and a channel of zeros stays zero.
  for name, leaf in _expand(rounded)["blocks"].items():
    weight = rounded["blocks"][name]
    step = getattr(weight, "scale", jnp.zeros(1)).max()
    assert jnp.abs(leaf - params["blocks"][name]).max() <= 0.5001 * step


def test_a_lane_with_int8_weights_computes_with_what_they_stand_for():
  rounded = jax.jit(int8.quantize)(tiny.make_params(0))
  logical_axes = int8.logical_axes(transformer.logical_axes(tiny.CONFIG))
  _, found = _serve(rounded, tiny.CONFIG, 2, logical_axes)
  names = transformer.logical_axes(tiny.CONFIG)
  _, expected = _serve(_expand(rounded), tiny.CONFIG, 2, names)
  tiny.assert_close(found, expected)


def test_the_store_moves_int8_and_checks_it():
  mesh = tiny.make_mesh(2, first=2)
  logical_axes = int8.logical_axes(transformer.logical_axes(tiny.CONFIG))
  store = store_lib.WeightStore(
    shardings={0: axes.shardings(logical_axes, mesh, axes.DECODE)},
    dtype=jnp.bfloat16,
    convert=jax.jit(int8.quantize),
  )
  params = tiny.make_params(0)
  publication = store.publish(0, params, holder="coordinator")
  store.reserve(0, holder="generator", mesh_id=0)
  placed = store.place(0, holder="generator")
  down = placed["blocks"]["down"]
  assert (down.values.dtype, down.scale.dtype) == (jnp.int8, jnp.bfloat16)
  sizes = [leaf.nbytes for leaf in jax.tree.leaves(placed)]
  assert publication.num_bytes == sum(sizes)
