"""Params as a list of layers in place of stacked ones, for CPUs.

A CPU copies what it slices off a stack, so that it would move a layer's weights
about as often as it multiplies by them. In training it moves what the backward
pass needs of a layer, too.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dora_jax import interfaces
from dora_jax.model import adapted, matrices, turned


def unstack(params: interfaces.Params) -> interfaces.Params:
  """The same params, as a generator reads them the fastest, layer after layer.

  They are copies, split over devices as before. Plain matrices of the layers
  are turned; those in int8, which are expanded before they are multiplied by,
  and factors of adapters stay as they are.
  """
  blocks = params["blocks"]
  num_layers = jax.tree.leaves(blocks)[0].shape[0]

  def take(layer):
    sliced = jax.tree.map(lambda leaf: _slice(leaf, layer), blocks)
    return {
      name: turned.turn(leaf, matrices.NUM_SUMMED[name])
      if name in matrices.NUM_SUMMED and isinstance(leaf, jax.Array)
      else leaf
      for name, leaf in sliced.items()
    }

  return params | {"blocks": [take(layer) for layer in range(num_layers)]}


def join(params: interfaces.Params) -> interfaces.Params:
  """The same params, with turned matrices that multiply alike joined.

  A product takes a while to start, so that small models gain by fewer. What a
  layer with adapters has of its base, which other versions share, stays.

  Args:
    params: as `unstack` makes them, on one device.
  """
  return params | {"blocks": [_join(block) for block in params["blocks"]]}


def _join(block):
  if any(isinstance(leaf, adapted.Weight) for leaf in block.values()):
    return block
  for first, *others in matrices.ALIKE:
    weights = [block[name] for name in (first, *others)]
    if all(isinstance(weight, turned.Turned) for weight in weights):
      joined = {first: turned.join(weights)}
      block = block | joined | dict.fromkeys(others, turned.Within())
  return block


@jax.custom_vjp
def apart(params: interfaces.Params) -> interfaces.Params:
  """The same, within a compiled function; the gradients come back stacked.

  JAX's own gradient would add up stacks that are 0 but for one layer.
  """
  blocks = params["blocks"]
  num_layers = jax.tree.leaves(blocks)[0].shape[0]
  take = lambda layer: jax.tree.map(lambda leaf: leaf[layer], blocks)
  return params | {"blocks": [take(layer) for layer in range(num_layers)]}


def _forward(params):
  return apart(params), None


def _backward(_, gradients):
  stack = lambda *layers: jnp.stack(layers)
  return (gradients | {"blocks": jax.tree.map(stack, *gradients["blocks"])},)


apart.defvjp(_forward, _backward)


def _slice(leaf: jax.Array, layer: int) -> jax.Array:
  sharding = leaf.sharding
  if isinstance(sharding, NamedSharding):
    spec = PartitionSpec(*sharding.spec[1:])
    sharding = NamedSharding(sharding.mesh, spec)
  return jax.device_put(leaf[layer], sharding)
