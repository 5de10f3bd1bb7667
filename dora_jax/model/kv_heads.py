"""KV heads repeated, so that more devices than heads can share them.

A repeated head serves its query heads in equal parts: the model computes what
it did, and a device holds one KV head where it would have to hold a part.
"""

import dataclasses
import math

import jax.numpy as jnp

from dora_jax import interfaces
from dora_jax.model import transformer

# In each leaf of a layer: which axis, the layers' included, is the KV heads'.
_REPEATED = {"key": 2, "value": 2, "key_bias": 1, "value_bias": 1}
_DIVIDED = {"query": 2, "query_bias": 1, "output": 1}


def count_copies(num_kv_heads: int, num_devices: int) -> int:
  """How often to repeat each KV head so that devices divide their number."""
  return num_devices // math.gcd(num_kv_heads, num_devices)


def repeat_in_config(
  config: transformer.ModelConfig, copies: int
) -> transformer.ModelConfig:
  """The sizes of the model whose KV heads are repeated."""
  return dataclasses.replace(config, num_kv_heads=config.num_kv_heads * copies)


def repeat(params: interfaces.Params, copies: int) -> interfaces.Params:
  """Params of the same model with so many copies of each KV head.

  Args:
    params: as `transformer.init_params` makes them.
    copies: a divisor of the query heads of each KV head.
  """

  def convert(name, leaf):
    if name in _REPEATED:
      return jnp.repeat(leaf, copies, axis=_REPEATED[name])
    if name in _DIVIDED:
      axis = _DIVIDED[name]
      before, (heads, queries), after = (
        leaf.shape[:axis],
        leaf.shape[axis : axis + 2],
        leaf.shape[axis + 2 :],
      )
      return leaf.reshape(*before, heads * copies, queries // copies, *after)
    return leaf

  blocks = {
    name: convert(name, leaf) for name, leaf in params["blocks"].items()
  }
  return params | {"blocks": blocks}
