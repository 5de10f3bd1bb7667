"""Params: structure, sharding. Forward: packing, padding, goldens, remat."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.model import attention, huggingface, layer_list, transformer
from dora_jax.parallel import axes, meshes

_STORIES = (
  pathlib.Path(__file__).parents[3] / "shared" / "data" / "stories260K" / "hf"
)


# Run a few times on tiny arrays, so compiling is all that it costs.
_UNOPTIMIZED = {"xla_backend_optimization_level": 0}


def _compute_logits(params, config, row, remat=False, hidden_sharding=None):
  tokens_BT, positions_BT, segment_ids_BT = row
  hidden_BTD, _ = transformer.forward(
    params,
    config,
    tokens_BT,
    positions_BT,
    attend=attention.segment_attention(segment_ids_BT),
    remat=remat,
    hidden_sharding=hidden_sharding,
  )
  return transformer.unembed(params, config, hidden_BTD)


_logits = jax.jit(
  _compute_logits,
  static_argnames=("config", "remat", "hidden_sharding"),
  compiler_options=_UNOPTIMIZED,
)


def _pack(sequences, *, num_tokens, padding_token=0):
  """Puts the sequences side by side in one row."""
  tokens_BT = np.full((1, num_tokens), padding_token, np.int32)
  positions_BT = np.zeros((1, num_tokens), np.int32)
  segment_ids_BT = np.zeros((1, num_tokens), np.int32)
  start = 0
  for number, sequence in enumerate(sequences, start=1):
    place = np.s_[0, start : start + len(sequence)]
    tokens_BT[place] = sequence
    positions_BT[place] = np.arange(len(sequence))
    segment_ids_BT[place] = number
    start += len(sequence)
  return [jnp.asarray(x) for x in (tokens_BT, positions_BT, segment_ids_BT)]


def _draw_sequences(lengths):
  rng = np.random.default_rng(0)
  return [rng.integers(0, 48, length) for length in lengths]


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_one_declaration_gives_shapes_axes_and_init(tiny_model, name):
  config, _ = tiny_model(name)
  params = transformer.init_params(config, key=jax.random.key(1))
  shapes = transformer.abstract_params(config, dtype=jnp.float32)
  described = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params
  )
  assert described == shapes
  sizes = config.axis_sizes
  jax.tree.map(
    lambda shape, names: np.testing.assert_equal(
      shape.shape, tuple(sizes[name] for name in names)
    ),
    shapes,
    transformer.logical_axes(config),
  )
  first, second = params["blocks"]["gate"][0], params["blocks"]["gate"][1]
  assert not np.array_equal(first, second)
  make = functools.partial(transformer.init_params, config)
  half = jax.eval_shape(lambda: make(key=jax.random.key(1), dtype=jnp.bfloat16))
  assert half == transformer.abstract_params(config, dtype=jnp.bfloat16)


def test_random_params_give_a_nearly_uniform_distribution(tiny_model):
  config, _ = tiny_model("qwen3")
  params = transformer.init_params(config, key=jax.random.key(0))
  row = _pack(_draw_sequences([16]), num_tokens=16)
  logits = _logits(params, config, row)
  assert 0.1 < float(jnp.std(logits)) < 3.0


@functools.partial(
  jax.jit,
  static_argnames=("config", "remat"),
  compiler_options=_UNOPTIMIZED,
)
def _loss_and_grads(params, config, row, *, remat=False):
  """A loss that weighs every real token and vocabulary entry differently."""

  def loss(params):
    logits_BTV = _compute_logits(params, config, row, remat)
    logprobs_BTV = jax.nn.log_softmax(logits_BTV)
    tokens_BT, _, segment_ids_BT = row
    weights_BT = jnp.where(
      segment_ids_BT > 0, jnp.sin(tokens_BT.astype(jnp.float32)), 0.0
    )
    return jnp.einsum(
      "BTV,BT->", logprobs_BTV[..., ::7], weights_BT
    ), logits_BTV

  return jax.value_and_grad(loss, has_aux=True)(params)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_packed_equals_unpacked(tiny_model, name):
  config, params = tiny_model(name)
  sequences = _draw_sequences([5, 9, 1, 7])
  (_, packed), grads = _loss_and_grads(
    params, config, _pack(sequences, num_tokens=24)
  )
  start, summed = 0, jax.tree.map(jnp.zeros_like, params)
  for sequence in sequences:
    (_, alone), alone_grads = _loss_and_grads(
      params, config, _pack([sequence], num_tokens=24)
    )
    end = start + len(sequence)
    np.testing.assert_allclose(
      packed[0, start:end], alone[0, : len(sequence)], atol=2e-5
    )
    summed = jax.tree.map(jnp.add, summed, alone_grads)
    start = end
  _assert_near(grads, summed)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_padding_has_no_influence_and_gives_no_nan(tiny_model, name):
  config, params = tiny_model(name)
  sequences = _draw_sequences([5, 9])
  row = _pack(sequences, num_tokens=24)
  padded = _pack(sequences, num_tokens=24, padding_token=31)
  with_empty_row = [jnp.concatenate([x, 0 * x]) for x in padded]
  (loss, _), grads = _loss_and_grads(params, config, row)
  (other_loss, logits), other_grads = _loss_and_grads(
    params, config, with_empty_row
  )
  assert bool(jnp.isfinite(logits).all())
  np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
  _assert_near(grads, other_grads)


def _assert_near(tree, other):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4),
    tree,
    other,
  )


def test_causal_attention_is_one_whole_segment(tiny_model):
  config, params = tiny_model("qwen3")
  row = _pack(_draw_sequences([8]), num_tokens=8)
  run = jax.jit(
    lambda params, tokens, positions: transformer.forward(
      params, config, tokens, positions, attend=attention.causal_attention()
    ),
    compiler_options=_UNOPTIMIZED,
  )
  hidden, _ = run(params, row[0], row[1])
  np.testing.assert_allclose(
    transformer.unembed(params, config, hidden),
    _logits(params, config, row),
    atol=1e-5,
  )


def test_kv_is_carried_through_the_layers_in_order(tiny_model):
  config, params = tiny_model("qwen2")
  tokens, positions, segments = _pack(_draw_sequences([8]), num_tokens=8)
  inner = attention.segment_attention(segments)

  def attend(query, key, value, kv, layer):
    pool, order = kv
    out, _ = inner(query, key, value, None, layer)
    return out, (
      pool.at[layer].set(value),
      order.at[layer].set(order.max() + 1),
    )

  kv = (
    jnp.zeros(
      (config.num_layers, 1, 8, config.num_kv_heads, config.head_width)
    ),
    jnp.zeros(config.num_layers, jnp.int32),
  )
  hidden, (pool, order) = transformer.forward(
    params, config, tokens, positions, attend=attend, kv=kv
  )
  assert order.tolist() == [1, 2, 3]
  assert all(float(jnp.abs(layer).sum()) > 0 for layer in pool)
  # So do layers that lie apart.
  layers = layer_list.unstack(params)
  again = transformer.forward(
    layers, config, tokens, positions, attend=attend, kv=kv
  )
  _assert_near((hidden, (pool, order)), again)


def test_remat_changes_nothing(tiny_model):
  config, params = tiny_model("qwen2")
  row = _pack(_draw_sequences([5, 9]), num_tokens=24)
  _, grads = _loss_and_grads(params, config, row)
  _, again = _loss_and_grads(params, config, row, remat=True)
  _assert_near(grads, again)


@pytest.mark.parametrize("table", ["train", "decode"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_sharded_equals_unsharded(tiny_model, name, table):
  config, params = tiny_model(name)
  found = meshes.split_devices(
    jax.devices(),
    trainer_fsdp=2,
    trainer_sequence=1,
    trainer_tensor=2,
    num_generators=2,
    generator_tensor=2,
    colocated=False,
  )
  mesh, rules = {
    "train": (found.trainer, axes.TRAIN),
    "decode": (found.generators[1], axes.DECODE),
  }[table]
  names = transformer.logical_axes(config)
  axes.check_divisible(params, names, mesh, rules)
  sharded = jax.device_put(params, axes.shardings(names, mesh, rules))
  row = _pack(_draw_sequences([5, 9, 1]), num_tokens=16)
  rows = [jnp.concatenate([x] * 4) for x in row]
  hidden = axes.shardings(("row", "token", "norm"), mesh, rules)
  placed = jax.device_put(rows, axes.shardings(("row", "token"), mesh, rules))
  np.testing.assert_allclose(
    _logits(sharded, config, placed, hidden_sharding=hidden),
    _logits(params, config, rows),
    rtol=1e-5,
    atol=1e-5,
  )


def test_bf16_stays_near_fp32_with_fp32_logits(tiny_model):
  config, params = tiny_model("qwen2")
  row = _pack(_draw_sequences([5, 9, 1]), num_tokens=16)
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  logits = _logits(half, config, row)
  assert logits.dtype == jnp.float32
  # 1% of the logits' spread, times a few for three layers.
  np.testing.assert_allclose(logits, _logits(params, config, row), atol=0.15)


def test_config_refuses_heads_that_do_not_divide():
  with pytest.raises(ValueError, match=r"num_heads is 6.*num_kv_heads = 4"):
    transformer.ModelConfig(
      vocab_size=8, width=8, mlp_width=8, num_layers=1, num_heads=6,
      num_kv_heads=4, head_width=2, rope_theta=1.0, norm_eps=1e-6,
      qk_norm=False, qkv_bias=False, tied_head=True, max_positions=8,
    )  # fmt: skip


def test_stories260k_tells_its_story():
  if not _STORIES.exists():
    pytest.skip(f"{_STORIES} is not here")
  import tokenizers

  config = huggingface.load_config(_STORIES)
  params = huggingface.load_params(_STORIES, config, dtype=jnp.float32)
  tokenizer = tokenizers.Tokenizer.from_file(str(_STORIES / "tokenizer.json"))
  expected = (
    "Once upon a time, there was a little girl named Lily. She loved to play "
    "outside in the park. One day, she saw a big, red ball."
  )
  tokens_BT = np.zeros((1, 80), np.int32)
  tokens_BT[0, 0] = 1
  positions_BT = np.arange(80, dtype=np.int32)[None]
  for length in range(1, 80):
    segment_ids_BT = (positions_BT < length).astype(np.int32)
    row = [jnp.asarray(x) for x in (tokens_BT, positions_BT, segment_ids_BT)]
    logits = _logits(params, config, row)
    tokens_BT[0, length] = int(jnp.argmax(logits[0, length - 1]))
  told = tokenizer.decode(tokens_BT[0].tolist()).strip()
  assert told.startswith(expected), told
