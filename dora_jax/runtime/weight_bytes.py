"""What a version weighs where it is served, and what all versions share."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dora_jax.trainer import trained as trained_lib

Config = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightBytes:
  """Bytes on a generator mesh, before any rounding to int8.

  Attributes:
    version: of what one version alone has there, and each publish moves.
    base: of what all versions share.
  """

  version: int
  base: int

  def on_device(self, *, num_versions: int, num_devices: int) -> int:
    """Bytes of so many versions on each of the devices that share them."""
    if not self.base:
      return num_versions * self.version // num_devices
    # Of most pairs of factors every device has one whole.
    return num_versions * self.version + self.base // num_devices


def count(config: Config, trained: trained_lib.Trained) -> WeightBytes:
  """Counts them by config.generator.dtype and config.trainer.lora_publish."""
  itemsize = jnp.dtype(config.generator.dtype).itemsize
  policy = trained if trained.base is None else trained.base
  whole = count_weights(policy) * itemsize
  if config.trainer.lora_publish == "merged":
    return WeightBytes(version=whole, base=0)
  # Adapters stay in float32; see served_form.make.
  return WeightBytes(version=4 * count_weights(trained), base=whole)


def count_weights(trained: trained_lib.Trained) -> int:
  """Numbers in all arrays together."""
  return sum(leaf.size for leaf in jax.tree.leaves(trained.shapes()))
