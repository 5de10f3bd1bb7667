"""Where Hugging Face checkpoints keep each weight: one explicit map."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from dora_jax.model import transformer

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """How a checkpoint stores one weight, or one layer of it.

  Attributes:
    name: the tensor's name, with {layer} where each layer has its own.
    order: our axes, the layer's left out, in the order that they are stored.
    num_rows: how many of those make up the tensor's first axis; any others
      make up its second.
  """

  name: str
  order: tuple[int, ...]
  num_rows: int

  def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The tensor's shape where ours is `shape`."""
    ordered = [shape[axis] for axis in self.order]
    rows, columns = ordered[: self.num_rows], ordered[self.num_rows :]
    return (
      (math.prod(rows), math.prod(columns)) if columns else (math.prod(rows),)
    )

  def to_stored(self, array: np.ndarray) -> np.ndarray:
    """Our array as it is stored, in memory of its own."""
    ordered = array.transpose(self.order)
    return np.ascontiguousarray(ordered.reshape(self.stored_shape(array.shape)))

  def from_stored(
    self, tensor: np.ndarray, shape: tuple[int, ...]
  ) -> np.ndarray:
    """A stored tensor as our array of this shape."""
    ordered = tensor.reshape([shape[axis] for axis in self.order])
    return ordered.transpose(np.argsort(self.order))


_VECTOR = {"order": (0,), "num_rows": 1}
_SAME = {"order": (0, 1), "num_rows": 1}
# PyTorch's linear layers store [out, in].
_MLP = {"order": (1, 0), "num_rows": 1}
# Query head n = k * G + g, so the axes K, G, H merge in this order.
_QUERY = {"order": (1, 2, 3, 0), "num_rows": 3}
_KEY = {"order": (1, 2, 0), "num_rows": 2}
_OUTPUT = {"order": (3, 0, 1, 2), "num_rows": 1}
_QUERY_BIAS = {"order": (0, 1, 2), "num_rows": 3}
_KEY_BIAS = {"order": (0, 1), "num_rows": 2}

_TOP = {
  "embed": StoredTensor(EMBED, **_SAME),
  "final_norm": StoredTensor("model.norm.weight", **_VECTOR),
}
_UNTIED = {"head": StoredTensor(HEAD, **_SAME)}


def _block(**layouts: tuple[str, dict]) -> dict[str, StoredTensor]:
  return {
    ours: StoredTensor(f"model.layers.{{layer}}.{name}", **layout)
    for ours, (name, layout) in layouts.items()
  }


_BLOCK = _block(
  attention_norm=("input_layernorm.weight", _VECTOR),
  query=("self_attn.q_proj.weight", _QUERY),
  key=("self_attn.k_proj.weight", _KEY),
  value=("self_attn.v_proj.weight", _KEY),
  output=("self_attn.o_proj.weight", _OUTPUT),
  mlp_norm=("post_attention_layernorm.weight", _VECTOR),
  gate=("mlp.gate_proj.weight", _MLP),
  up=("mlp.up_proj.weight", _MLP),
  down=("mlp.down_proj.weight", _MLP),
)
_QKV_BIAS = _block(
  query_bias=("self_attn.q_proj.bias", _QUERY_BIAS),
  key_bias=("self_attn.k_proj.bias", _KEY_BIAS),
  value_bias=("self_attn.v_proj.bias", _KEY_BIAS),
)
_QK_NORM = _block(
  query_norm=("self_attn.q_norm.weight", _VECTOR),
  key_norm=("self_attn.k_norm.weight", _VECTOR),
)


def stored_tensors(config: transformer.ModelConfig) -> dict:
  """The tree of the params with a StoredTensor for each array."""
  block = dict(_BLOCK)
  if config.qkv_bias:
    block |= _QKV_BIAS
  if config.qk_norm:
    block |= _QK_NORM
  top = dict(_TOP) if config.tied_head else _TOP | _UNTIED
  return {**top, "blocks": block}


def layer_names(
  tensor: StoredTensor, num_layers: int
) -> Iterator[tuple[int | None, str]]:
  """The names under which a weight is stored, each with its layer.

  A weight outside the blocks has one name, and None for its layer.
  """
  if "{layer}" not in tensor.name:
    yield None, tensor.name
    return
  for layer in range(num_layers):
    yield layer, tensor.name.format(layer=layer)
