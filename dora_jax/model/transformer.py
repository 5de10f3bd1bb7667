"""The decoder-only transformer that trainer and generators share.

Everything outside sees a nested dict of arrays, `Params`; inside it is a flax
module. How tokens attend to each other is the caller's `attend`, through which
training masks, prefill and paged decoding are woven into the same layers.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from dora_jax import interfaces
from dora_jax.model import (
  adapted,
  attention,
  declare,
  int8,
  linear,
  norm,
  rope,
  turned,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Sizes and variants of one decoder-only transformer.

  Attributes:
    vocab_size: rows of the embedding table, V.
    width: of the residual stream, D.
    mlp_width: F.
    num_layers: L.
    num_heads: query heads, N; a multiple of num_kv_heads.
    num_kv_heads: K.
    head_width: H; even.
    rope_theta: base of the rotary wavelengths.
    norm_eps: added to the mean square in every RMSNorm.
    qk_norm: whether queries and keys are normalised per head (Qwen3).
    qkv_bias: whether the three input projections have a bias (Qwen2).
    tied_head: whether the output head is the embedding table.
    max_positions: the longest context that the model was made for.
    rope_scaling: how rotary positions are stretched; None leaves them as is.
  """

  vocab_size: int
  width: int
  mlp_width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_width: int
  rope_theta: float
  norm_eps: float
  qk_norm: bool
  qkv_bias: bool
  tied_head: bool
  max_positions: int
  rope_scaling: rope.Llama3Scaling | None = None

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads is {self.num_heads}, which num_kv_heads = "
        f"{self.num_kv_heads} must divide: change either in the model's config."
      )
    if self.head_width % 2:
      raise ValueError(
        f"head_width is {self.head_width} but rotary positions turn pairs: "
        "make head_width even in the model's config."
      )

  @property
  def num_query_groups(self) -> int:
    """Query heads that share one KV head, G."""
    return self.num_heads // self.num_kv_heads

  @property
  def axis_sizes(self) -> dict[str, int]:
    """Size of each logical axis that a weight may have."""
    return {
      "vocab": self.vocab_size,
      "embed": self.width,
      "norm": self.width,
      "mlp": self.mlp_width,
      "kv_head": self.num_kv_heads,
      "query_group": self.num_query_groups,
      "head_width": self.head_width,
      "layer": self.num_layers,
    }


class Block(nnx.Module):
  """One layer: attention and a gated MLP, each normalised before, added after.

  Source: LLaMA, section 2.2 (https://arxiv.org/abs/2302.13971).
  """

  def __init__(self, config: ModelConfig, draw: declare.Draw, dtype: Any):
    weights = declare.Declare(config.axis_sizes, draw, dtype)
    query = ("kv_head", "query_group", "head_width")
    key = ("kv_head", "head_width")
    width, heads_width = config.width, config.num_heads * config.head_width
    # So that the residual stream's scale does not grow with depth (GPT-2, 2.3).
    depth = 2 * config.num_layers
    self.config = config
    self.attention_norm = weights.constant("norm", value=1.0)
    self.query = weights.normal("embed", *query, fan_in=width)
    self.key = weights.normal("embed", *key, fan_in=width)
    self.value = weights.normal("embed", *key, fan_in=width)
    self.output = weights.normal(*query, "embed", fan_in=heads_width * depth)
    if config.qkv_bias:
      self.query_bias = weights.constant(*query, value=0.0)
      self.key_bias = weights.constant(*key, value=0.0)
      self.value_bias = weights.constant(*key, value=0.0)
    if config.qk_norm:
      self.query_norm = weights.constant("head_width", value=1.0)
      self.key_norm = weights.constant("head_width", value=1.0)
    self.mlp_norm = weights.constant("norm", value=1.0)
    self.gate = weights.normal("embed", "mlp", fan_in=width)
    self.up = weights.normal("embed", "mlp", fan_in=width)
    self.down = weights.normal("mlp", "embed", fan_in=config.mlp_width * depth)

  def __call__(
    self,
    hidden_BTD: Float[jax.Array, "B T D"],
    rotation: rope.Rotation,
    attend: attention.Attend,
    kv: Any,
    layer: Int[jax.Array, ""],
  ) -> tuple[Float[jax.Array, "B T D"], Any]:
    """The residual stream after this layer, and what `attend` kept in `kv`."""
    eps = self.config.norm_eps
    with jax.named_scope("attention"):
      normed_BTD = norm.rms_norm(hidden_BTD, self.attention_norm[...], eps)
      query_BTKGH, key_BTKH, value_BTKH = self.project(normed_BTD, rotation)
      out_BTKGH, kv = attend(query_BTKGH, key_BTKH, value_BTKH, kv, layer)
      hidden_BTD += linear.product(
        "BTKGH,KGHD->BTD", out_BTKGH, self.output.get_value()
      )
    with jax.named_scope("mlp"):
      normed_BTD = norm.rms_norm(hidden_BTD, self.mlp_norm[...], eps)
      gate_BTF, up_BTF = linear.products(
        normed_BTD,
        ("BTD,DF->BTF", self.gate.get_value()),
        ("BTD,DF->BTF", self.up.get_value()),
      )
      gated_BTF = jax.nn.silu(gate_BTF) * up_BTF
      hidden_BTD += linear.product(
        "BTF,FD->BTD", gated_BTF, self.down.get_value()
      )
    return hidden_BTD, kv

  def project(
    self,
    normed_BTD: Float[jax.Array, "B T D"],
    rotation: rope.Rotation,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of a layer, rotated to their positions."""
    config = self.config
    query_BTKGH, key_BTKH, value_BTKH = linear.products(
      normed_BTD,
      ("BTD,DKGH->BTKGH", self.query.get_value()),
      ("BTD,DKH->BTKH", self.key.get_value()),
      ("BTD,DKH->BTKH", self.value.get_value()),
    )
    if config.qkv_bias:
      query_BTKGH = linear.add_bias(query_BTKGH, self.query_bias[...])
      key_BTKH = linear.add_bias(key_BTKH, self.key_bias[...])
      value_BTKH = linear.add_bias(value_BTKH, self.value_bias[...])
    eps = config.norm_eps
    if config.qk_norm:
      query_BTKGH = norm.rms_norm(query_BTKGH, self.query_norm[...], eps)
      key_BTKH = norm.rms_norm(key_BTKH, self.key_norm[...], eps)
    query_BTKGH = rope.rotate(query_BTKGH, rotation)
    key_BTKH = rope.rotate(key_BTKH, rotation)
    return query_BTKGH, key_BTKH, value_BTKH


class Transformer(nnx.Module):
  """Embedding, L blocks stacked on a leading axis, final norm, output head."""

  def __init__(
    self, config: ModelConfig, blocks: Block, draw: declare.Draw, dtype: Any
  ):
    weights = declare.Declare(config.axis_sizes, draw, dtype)
    self.config = config
    self.embed = weights.normal("vocab", "embed", fan_in=config.width)
    self.blocks = blocks
    self.final_norm = weights.constant("norm", value=1.0)
    if not config.tied_head:
      self.head = weights.normal("vocab", "embed", fan_in=config.width)

  def __call__(
    self,
    tokens_BT: Int[jax.Array, "B T"],
    rotation: rope.Rotation,
    *,
    attend: attention.Attend,
    kv: Any,
    layers: Sequence[Any] | None,
    remat: bool,
    sharding: jax.sharding.Sharding | None,
    dtype: Any,
  ) -> tuple[Float[jax.Array, "B T D"], Any]:
    """Hidden states after the final norm; see `forward`."""
    constrain = lambda hidden_BTD: hidden_BTD
    if sharding is not None:
      constrain = lambda x: jax.lax.with_sharding_constraint(x, sharding)
    block_def, block_states = nnx.split(self.blocks)

    def apply_block(carry, layer_and_state):
      hidden_BTD, kv = carry
      layer, state = layer_and_state
      # Here, so that no more than a layer of rounded or adapted weights is ever
      # expanded.
      block = nnx.merge(block_def, adapted.merge(int8.dequantize(state)))
      hidden_BTD, kv = block(hidden_BTD, rotation, attend, kv, layer)
      return (constrain(hidden_BTD), kv), None

    if remat:
      apply_block = jax.checkpoint(apply_block, prevent_cse=False)
    carry = constrain(self.embed[...][tokens_BT].astype(dtype)), kv
    if layers is None:
      index_L = jnp.arange(self.config.num_layers, dtype=jnp.int32)
      carry, _ = jax.lax.scan(apply_block, carry, (index_L, block_states))
    else:
      for index, state in enumerate(layers):
        carry, _ = apply_block(carry, (jnp.int32(index), state))
    hidden_BTD, kv = carry
    eps = self.config.norm_eps
    return norm.rms_norm(hidden_BTD, self.final_norm[...], eps), kv


def _build(config: ModelConfig, key: jax.Array, dtype: Any) -> Transformer:
  """The module with random weights."""
  blocks_key, top_key = jax.random.split(key)
  keys_L = jax.random.split(blocks_key, config.num_layers)
  make_block = lambda draw: Block(config, draw, dtype)
  blocks = declare.build_layers(make_block, keys_L)
  make_top = lambda draw: Transformer(config, blocks, draw, dtype)
  return declare.build(make_top, top_key)


@functools.lru_cache
def _structure(config: ModelConfig) -> tuple[Any, Any]:
  """The module's structure and its abstract fp32 weights, with their axes."""
  make = lambda key: _build(config, key, jnp.float32)
  return nnx.split(nnx.eval_shape(make, jax.random.key(0)))


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def init_params(
  config: ModelConfig, *, key: jax.Array, dtype: Any = jnp.float32
) -> interfaces.Params:
  """Draws random weights; `key` is a jax.random.key."""
  return nnx.to_pure_dict(nnx.state(_build(config, key, dtype)))


def abstract_params(config: ModelConfig, *, dtype: Any) -> interfaces.Params:
  """The tree of `init_params` with a jax.ShapeDtypeStruct for each array."""
  describe = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype)
  return jax.tree.map(describe, nnx.to_pure_dict(_structure(config)[1]))


def logical_axes(config: ModelConfig) -> interfaces.Params:
  """The tree of `init_params` with a tuple of axis names for each array."""
  axes = declare.read_axes(_structure(config)[1])
  for name, block_axes in axes["blocks"].items():
    axes["blocks"][name] = ("layer", *block_axes)
  return axes


def find_rotation(
  config: ModelConfig, positions_BT: Int[jax.typing.ArrayLike, "B T"]
) -> rope.Rotation:
  """What the heads of tokens at these positions turn by, in all layers."""
  frequencies = rope.inverse_frequencies(
    config.head_width, config.rope_theta, config.rope_scaling
  )
  return rope.find_rotation(jnp.asarray(positions_BT), frequencies)


def forward(
  params: interfaces.Params,
  config: ModelConfig,
  tokens_BT: Int[jax.typing.ArrayLike, "B T"],
  positions: Int[jax.typing.ArrayLike, "B T"] | rope.Rotation,
  *,
  attend: attention.Attend,
  kv: Any = None,
  remat: bool = False,
  hidden_sharding: jax.sharding.Sharding | None = None,
  dtype: Any = None,
) -> tuple[Float[jax.Array, "B T D"], Any]:
  """Runs the layers.

  Args:
    params: as `init_params`, `layer_list.unstack` or `layer_list.join` makes
      them.
    config: what they were made for.
    tokens_BT: token ids.
    positions: of each token in its own sequence, [B, T], for the rotary ones;
      or what `find_rotation` makes of them.
    attend: mixes the tokens of a layer; see `attention.Attend`.
    kv: handed to `attend` layer after layer as the scan's carry, so that a pool
      with a leading L axis is updated in place.
    remat: whether the backward pass recomputes each layer.
    hidden_sharding: of the residual stream, where XLA should not guess it.
    dtype: of the computation; None is that of the params. Wider params get
      gradients of their own dtype.

  Returns:
    The hidden states after the final norm, and the last `kv`.
  """
  layers = params["blocks"] if isinstance(params["blocks"], list) else None
  if layers is not None:
    params = params | {"blocks": layers[0]}
  model = nnx.merge(_structure(config)[0], params)
  if not isinstance(positions, rope.Rotation):
    positions = find_rotation(config, positions)
  return model(
    jnp.asarray(tokens_BT),
    positions,
    attend=attend,
    kv=kv,
    layers=layers,
    remat=remat,
    sharding=hidden_sharding,
    dtype=params["embed"].dtype if dtype is None else dtype,
  )


def head(
  params: interfaces.Params, config: ModelConfig
) -> Float[jax.Array, "V D"]:
  """The output head, one row a token."""
  return params["embed"] if config.tied_head else params["head"]


def unembed(
  params: interfaces.Params,
  config: ModelConfig,
  hidden: Float[jax.Array, "*rows D"],
) -> Float[jax.Array, "*rows V"]:
  """Logits of hidden states after the final norm, in fp32."""
  return turned.product(hidden, head(params, config), dtype=jnp.float32)
