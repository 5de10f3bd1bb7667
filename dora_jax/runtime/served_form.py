"""The form in which generators take the params, if not the trainer's own."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from dora_jax.model import int8, kv_heads, transformer

Config = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedForm:
  """Params as generators take them.

  Attributes:
    shape: of the model that they are for; it computes what the trainer's does.
    logical_axes: names of their axes.
    convert: makes them of the trainer's, once these are cast.
    is_rounded: whether that loses digits.
  """

  shape: transformer.ModelConfig
  logical_axes: Any
  convert: Callable[[Any], Any]
  is_rounded: bool


def make(config: Config, shape: transformer.ModelConfig) -> ServedForm:
  """The form for config.generator on config.mesh."""
  copies = kv_heads.count_copies(
    shape.num_kv_heads, config.mesh.generator_tensor
  )
  is_rounded = config.generator.weights_dtype == "int8"
  served = kv_heads.repeat_in_config(shape, copies)
  logical_axes = transformer.logical_axes(served)
  if is_rounded:
    logical_axes = int8.logical_axes(logical_axes)
  convert = functools.partial(_convert, copies=copies, is_rounded=is_rounded)
  return ServedForm(
    shape=served,
    logical_axes=logical_axes,
    convert=jax.jit(convert),
    is_rounded=is_rounded,
  )


def _convert(params: Any, *, copies: int, is_rounded: bool) -> Any:
  if copies > 1:
    params = kv_heads.repeat(params, copies)
  return int8.quantize(params) if is_rounded else params
