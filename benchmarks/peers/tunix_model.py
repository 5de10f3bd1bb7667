"""The model that both of Tunix's peers run; imported from their own folder."""

import json

import jax
from flax import nnx
from tunix.models.qwen3 import model as qwen3


def make_config(shape: dict) -> qwen3.ModelConfig:
  """Of the sizes in benchmarks/shapes.py."""
  return qwen3.ModelConfig(
    num_layers=shape["num_layers"],
    vocab_size=shape["vocab_size"],
    embed_dim=shape["width"],
    hidden_dim=shape["mlp_width"],
    num_heads=shape["num_heads"],
    num_kv_heads=shape["num_kv_heads"],
    head_dim=shape["head_width"],
    rope_theta=10_000,
    norm_eps=1e-6,
    use_tied_embedding=False,
  )


def tell_size(model: nnx.Module) -> None:
  """The first answer of a peer: it is ready, and so large."""
  num_params = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
  print(json.dumps({"num_params": int(num_params)}), flush=True)
