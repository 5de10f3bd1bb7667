"""Rotary positions: one definition, used by the trainer and the generators."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
  """How Llama 3.1 stretches its rotary positions to longer contexts.

  Wavelengths beyond original_max_positions / low_freq_factor are stretched by
  factor, those below original_max_positions / high_freq_factor are kept, and
  those between are blended.

  Attributes:
    factor: by how much long wavelengths are stretched.
    low_freq_factor: see above.
    high_freq_factor: see above; more than low_freq_factor.
    original_max_positions: the context that the model was pretrained with.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_positions: int


def inverse_frequencies(
  head_width: int, theta: float, scaling: Llama3Scaling | None
) -> Float[np.ndarray, "half"]:
  """Radians that each pair of head components turns by per position.

  f[i] = theta ** (-2 i / H), then stretched where `scaling` says so.

  Source: RoFormer, section 3.2.2 (https://arxiv.org/abs/2104.09864); for the
  stretching, the code that Meta released with Llama 3.1.
  """
  frequencies = theta ** (-np.arange(0, head_width, 2) / head_width)
  if scaling is None:
    return frequencies.astype(np.float32)
  turns = scaling.original_max_positions * frequencies / (2 * math.pi)
  kept_share = np.clip(
    (turns - scaling.low_freq_factor)
    / (scaling.high_freq_factor - scaling.low_freq_factor),
    0.0,
    1.0,
  )
  stretched = frequencies / scaling.factor
  blended = kept_share * frequencies + (1 - kept_share) * stretched
  return blended.astype(np.float32)


class Rotation(NamedTuple):
  """Cosines and sines of what each pair of each token turns by."""

  cos_BTI: Float[jax.Array, "B T half"]
  sin_BTI: Float[jax.Array, "B T half"]


def find_rotation(
  positions_BT: Int[jax.Array, "B T"], frequencies: Float[np.ndarray, "half"]
) -> Rotation:
  """Pair i turns by position * frequencies[i]; alike for all heads and layers.

  Computes in fp32: a bf16 angle is off by radians at position 1000.
  """
  positions_BT1 = positions_BT.astype(jnp.float32)[..., None]
  angles_BTI = positions_BT1 * frequencies[None, None]
  return Rotation(cos_BTI=jnp.cos(angles_BTI), sin_BTI=jnp.sin(angles_BTI))


def rotate(
  heads: Float[jax.Array, "B T *heads H"], rotation: Rotation
) -> Float[jax.Array, "B T *heads H"]:
  """Turns pair (i, i + H/2) of each head by its token's angle i, in fp32.

  The halves form the pairs, as in Hugging Face checkpoints, not neighbours.
  """
  head_axes = range(2, heads.ndim - 1)
  cos, sin = (jnp.expand_dims(each, head_axes) for each in rotation)
  first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
  rotated = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(rotated, axis=-1).astype(heads.dtype)
