"""KV heads repeated, so that more devices than heads can share them.

A repeated head serves its query heads in equal parts: the model computes what
it did, and a device holds one KV head where it would have to hold a part.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array

from dora_jax import interfaces
from dora_jax.model import matrices, transformer

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
  blocks = {
    name: _convert(leaf, copies, _REPEATED.get(name), _DIVIDED.get(name))
    for name, leaf in params["blocks"].items()
  }
  return params | {"blocks": blocks}


def repeat_factors(
  factors: interfaces.Params, copies: int
) -> interfaces.Params:
  """The same of factors that are added to such params; see `adapted.join`.

  One of a pair has the KV heads' axis, and with it the query heads'.
  """

  def convert(name, pair):
    repeated, divided = _REPEATED.get(name), _DIVIDED.get(name)
    axis = divided if repeated is None else repeated
    if axis is None:
      return pair
    num_summed = matrices.NUM_SUMMED[name]
    if axis <= num_summed:
      return pair | {"a": _convert(pair["a"], copies, repeated, divided)}
    # The second has the rank in place of all axes that are summed over.
    move = lambda found: None if found is None else found - num_summed + 1
    b = _convert(pair["b"], copies, move(repeated), move(divided))
    return pair | {"b": b}

  blocks = {
    name: convert(name, pair) for name, pair in factors["blocks"].items()
  }
  return factors | {"blocks": blocks}


def _convert(
  leaf: Array, copies: int, repeated: int | None, divided: int | None
) -> Array:
  """The leaf with the KV heads' axis made longer; as it is without one."""
  if repeated is not None:
    return jnp.repeat(leaf, copies, axis=repeated)
  if divided is not None:
    before, (heads, queries), after = (
      leaf.shape[:divided],
      leaf.shape[divided : divided + 2],
      leaf.shape[divided + 2 :],
    )
    return leaf.reshape(*before, heads * copies, queries // copies, *after)
  return leaf
