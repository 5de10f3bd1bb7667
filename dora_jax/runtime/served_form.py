"""The form in which generators take the params, if not the trainer's own.

Each version is published whole, or as adapters on a base that is frozen.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dora_jax.model import int8, kv_heads, transformer
from dora_jax.parallel import axes
from dora_jax.runtime import pieces
from dora_jax.trainer import lora
from dora_jax.weights import frozen_base, store

Config = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
  """Arrays as generators take them.

  Attributes:
    logical_axes: names of their axes.
    dtype: that the trainer's are cast to.
    convert: makes them of the trainer's, once these are cast.
  """

  logical_axes: Any
  dtype: Any
  convert: Callable[[Any], Any]

  def shardings(
    self, generators: Sequence[jax.sharding.Mesh]
  ) -> dict[int, Any]:
    """Generator mesh -> where it has the arrays."""
    return {
      mesh_id: axes.shardings(self.logical_axes, mesh, axes.DECODE)
      for mesh_id, mesh in enumerate(generators)
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseForm(Form):
  """The form of what adapters are put on.

  Attributes:
    scale: of the adapters.
  """

  scale: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedForm:
  """What generators are given, in all and with each version.

  Attributes:
    shape: of the model that it is for; it computes what the trainer's does.
    version: what is published with each version.
    base: what all versions share; None where nothing is.
    is_rounded: whether publishing loses digits.
  """

  shape: transformer.ModelConfig
  version: Form
  base: BaseForm | None
  is_rounded: bool

  def make_store(
    self, generators: Sequence[jax.sharding.Mesh]
  ) -> store.WeightStore:
    """A store of versions for these meshes."""
    return store.WeightStore(
      shardings=self.version.shardings(generators),
      dtype=self.version.dtype,
      convert=self.version.convert,
    )

  def make_base(
    self, generators: Sequence[jax.sharding.Mesh]
  ) -> frozen_base.FrozenBase | None:
    """What those versions share on these meshes; None where nothing."""
    return self.base and frozen_base.FrozenBase(
      shardings=self.base.shardings(generators),
      dtype=self.base.dtype,
      convert=self.base.convert,
      scale=self.base.scale,
    )


def make(config: Config, shape: transformer.ModelConfig) -> ServedForm:
  """The form for config.generator on config.mesh."""
  copies = kv_heads.count_copies(
    shape.num_kv_heads, config.mesh.generator_tensor
  )
  served = kv_heads.repeat_in_config(shape, copies)
  whole = _whole(config, served, copies=copies)
  if config.trainer.lora_publish == "merged":
    is_int8 = config.generator.weights_dtype == "int8"
    return ServedForm(
      shape=served,
      version=whole,
      base=None,
      is_rounded=is_int8 or whole.dtype != jnp.float32,
    )
  settings = pieces.make_adapters(config)
  assert settings is not None  # By config.validate.
  repeat = functools.partial(kv_heads.repeat_factors, copies=copies)
  adapters = Form(
    logical_axes=lora.Adapters(served, settings).logical_axes(),
    # They are few, and the sum is rounded once, as where it is published.
    dtype=jnp.dtype("float32"),
    convert=jax.jit(repeat),
  )
  return ServedForm(
    shape=served,
    version=adapters,
    base=BaseForm(**vars(whole), scale=settings.scale),
    is_rounded=False,
  )


def _whole(
  config: Config, served: transformer.ModelConfig, *, copies: int
) -> Form:
  """The form of all params, adapters aside."""
  is_int8 = config.generator.weights_dtype == "int8"
  logical_axes = transformer.logical_axes(served)
  if is_int8:
    logical_axes = int8.logical_axes(logical_axes)
  convert = functools.partial(_convert, copies=copies, is_int8=is_int8)
  return Form(
    logical_axes=logical_axes,
    dtype=jnp.dtype(config.generator.dtype),
    convert=jax.jit(convert),
  )


def _convert(params: Any, *, copies: int, is_int8: bool) -> Any:
  if copies > 1:
    params = kv_heads.repeat(params, copies)
  return int8.quantize(params) if is_int8 else params
