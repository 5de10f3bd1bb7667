"""Params in a generator's own form, against the model as the trainer has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.model import adapted, int8, kv_heads, matrices, transformer
from dora_jax.parallel import axes
from dora_jax.trainer import lora
from dora_jax.weights import frozen_base
from dora_jax.weights import store as store_lib
from tests.generator import tiny

_ADAPTERS = lora.Settings(
  rank=3, alpha=1.5, targets=tuple(matrices.NUM_SUMMED), seed=0
)


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


def _make_factors(version: int):
  """Of all matrices; as large as what they are added to."""
  shapes = lora.Adapters(tiny.CONFIG, _ADAPTERS).shapes()
  rng = np.random.default_rng(version)
  return jax.tree.map(
    lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32), shapes
  )


def _merge(params, factors):
  joined = adapted.join(params, factors, scale=_ADAPTERS.scale)
  return adapted.merge_layers(joined)


@pytest.mark.parametrize(
  ("tensor", "is_int8"), [(1, False), (4, True)], ids=["float", "split int8"]
)
def test_versions_on_one_base_sample_what_merged_ones_do(tensor, is_int8):
  copies = kv_heads.count_copies(tiny.CONFIG.num_kv_heads, tensor)
  config = kv_heads.repeat_in_config(tiny.CONFIG, copies)
  names = transformer.logical_axes(config)
  base = kv_heads.repeat(tiny.make_params(0), copies)
  base_names = int8.logical_axes(names) if is_int8 else names
  base = int8.quantize(base) if is_int8 else base
  mesh = tiny.make_mesh(tensor)
  put = lambda tree, names: jax.device_put(
    tree, axes.shardings(names, mesh, axes.DECODE)
  )
  worker = tiny.make_worker(
    config=config, tensor=tensor, lanes=[(0, 4), (1, 4)]
  )
  shared = worker.engine.arrange(put(base, base_names))
  whole = _expand(base) if is_int8 else base
  adapters = lora.Adapters(config, _ADAPTERS)
  for version, lane in enumerate(worker.lanes):
    factors = kv_heads.repeat_factors(_make_factors(version), copies)
    assert jax.tree.map(jnp.shape, factors) == jax.tree.map(
      lambda x: x.shape, adapters.shapes()
    )
    placed = worker.engine.arrange(put(factors, adapters.logical_axes()))
    lane.load(version, adapted.join(shared, placed, scale=_ADAPTERS.scale))
    requests = [
      tiny.make_request(g, length=9, version=version) for g in range(3)
    ]
    other = tiny.make_worker(config=config, tensor=tensor).lanes[0]
    other.load(version, put(_merge(whole, factors), names))
    tiny.assert_close(tiny.run(lane, requests), tiny.run(other, requests))
  # No version has a copy of what it does not change.
  arrays = jax.tree.leaves(shared)
  for lane in worker.lanes:
    assert lane._served is not None
    served = {id(leaf) for leaf in jax.tree.leaves(lane._served.params)}
    assert {id(leaf) for leaf in arrays} <= served
    num_own = len(served) - len(arrays)
    assert num_own == 2 * len(_ADAPTERS.targets) * config.num_layers


def test_repeated_factors_add_up_to_the_repeated_sum():
  # What is merged and then repeated is what is repeated and then merged.
  params, factors = tiny.make_params(0), _make_factors(0)
  expected = kv_heads.repeat(_merge(params, factors), 2)
  found = _merge(
    kv_heads.repeat(params, 2), kv_heads.repeat_factors(factors, 2)
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected
  )


def test_a_base_is_sent_once_and_a_version_is_its_adapters():
  mesh = tiny.make_mesh(2, first=2)
  adapters = lora.Adapters(tiny.CONFIG, _ADAPTERS)
  names = transformer.logical_axes(tiny.CONFIG)
  base = frozen_base.FrozenBase(
    shardings={0: axes.shardings(names, mesh, axes.DECODE)},
    dtype=jnp.bfloat16,
    convert=lambda params: params,
    scale=_ADAPTERS.scale,
  )
  store = store_lib.WeightStore(
    shardings={0: axes.shardings(adapters.logical_axes(), mesh, axes.DECODE)},
    dtype=jnp.float32,
  )
  params = tiny.make_params(0)
  base.place(params)
  with pytest.raises(RuntimeError, match="on the generator meshes already"):
    base.place(params)
  num_weights = sum(leaf.size for leaf in jax.tree.leaves(params))
  assert base.num_bytes == 2 * num_weights
  taken = base.take(0)
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.bfloat16)),
    jax.device_get(taken),
    jax.device_get(params),
  )
  with pytest.raises(RuntimeError, match=r"not on generator mesh 0: .* once"):
    base.take(0)
  # Each factor of a matrix is its inputs, or its outputs, times the rank.
  rank, config = _ADAPTERS.rank, tiny.CONFIG
  heads = config.num_heads * config.head_width
  keys = config.num_kv_heads * config.head_width
  sides = 2 * (config.width + heads) + 2 * (config.width + keys)
  sides += 3 * (config.width + config.mlp_width)
  publication = store.publish(0, _make_factors(0), holder="coordinator")
  assert publication.num_bytes == 4 * rank * sides * config.num_layers
  store.reserve(0, holder="generator", mesh_id=0)
  placed = store.place(0, holder="generator")
  assert publication.num_bytes == sum(x.nbytes for x in jax.tree.leaves(placed))
