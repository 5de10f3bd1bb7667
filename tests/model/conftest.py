"""Tiny models of every family, their weights made by a formula."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.model import rope, transformer

_LLAMA = transformer.ModelConfig(
  vocab_size=48,
  width=16,
  mlp_width=20,
  num_layers=3,
  num_heads=8,
  num_kv_heads=4,
  head_width=2,
  rope_theta=100.0,
  norm_eps=1e-5,
  qk_norm=False,
  qkv_bias=False,
  tied_head=False,
  max_positions=64,
)

# Head widths other than width / num_heads where a family allows it.
TINY = {
  "llama": _LLAMA,
  "llama_tied": dataclasses.replace(_LLAMA, tied_head=True, head_width=4),
  "llama3_scaled": dataclasses.replace(
    _LLAMA,
    head_width=8,
    rope_scaling=rope.Llama3Scaling(
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_positions=32,
    ),
  ),
  "qwen2": dataclasses.replace(_LLAMA, qkv_bias=True, num_kv_heads=2),
  "qwen3": dataclasses.replace(
    _LLAMA, qk_norm=True, head_width=6, tied_head=True, norm_eps=1e-6
  ),
}


def make_params(config: transformer.ModelConfig):
  """Weights that any machine makes alike, without a random generator."""
  shapes = transformer.abstract_params(config, dtype=jnp.float32)
  leaves, structure = jax.tree.flatten(shapes)
  axes = jax.tree.leaves(
    transformer.logical_axes(config), is_leaf=lambda x: isinstance(x, tuple)
  )
  made = []
  for number, (leaf, names) in enumerate(zip(leaves, axes, strict=True)):
    index = np.arange(leaf.size, dtype=np.float64)
    noise = np.sin(0.01 * index**2 + number).reshape(leaf.shape)
    is_scale = names[-1] == "norm" or names == ("layer", "head_width")
    weight = 1 + 0.2 * noise if is_scale else 0.3 * noise
    made.append(jnp.asarray(weight, jnp.float32))
  return jax.tree.unflatten(structure, made)


@pytest.fixture(params=TINY)
def family(request):
  """The name of each tiny model in turn."""
  return request.param


@pytest.fixture
def config(family):
  return TINY[family]


@pytest.fixture
def params(config):
  return make_params(config)


@pytest.fixture
def tiny_model():
  """Makes (config, params) of the tiny model with this name."""
  return lambda name: (TINY[name], make_params(TINY[name]))
