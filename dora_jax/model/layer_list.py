"""Params as a list of layers in place of stacked ones, for CPUs.

A CPU copies what it slices off a stack, so that it would move a layer's weights
about as often as it multiplies by them. In training it moves what the backward
pass needs of a layer, too.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from dora_jax import interfaces


def unstack(params: interfaces.Params) -> interfaces.Params:
  """The same params, as `transformer.forward` takes them layer after layer.

  They are copies, split over devices as before.
  """
  blocks = params["blocks"]
  num_layers = jax.tree.leaves(blocks)[0].shape[0]
  take = lambda layer: jax.tree.map(lambda leaf: _slice(leaf, layer), blocks)
  return params | {"blocks": [take(layer) for layer in range(num_layers)]}


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


def _slice(leaf: Array, layer: int) -> Array:
  sharding = leaf.sharding
  if isinstance(sharding, NamedSharding):
    spec = PartitionSpec(*sharding.spec[1:])
    sharding = NamedSharding(sharding.mesh, spec)
  return jax.device_put(leaf[layer], sharding)
