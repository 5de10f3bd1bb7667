import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax import config as config_lib
from dora_jax.generator.attention import choice, gpu, tpu
from dora_jax.parallel import kernel_choice
from tests.generator import tiny
from tests.generator.attention import paged


@dataclasses.dataclass(frozen=True)
class _Device:
  """Of a platform that is not here."""

  id: int
  platform: str


def _make_mesh(platform):
  devices = np.array([_Device(0, platform), _Device(1, platform)], dtype=object)
  return jax.sharding.Mesh(devices, ("tensor",))


def _choose(name, platform, **changes):
  settings = {"page_size": 64, "dtype": jnp.bfloat16}
  settings |= {key: changes.pop(key) for key in settings if key in changes}
  return choice.choose(
    name, _make_mesh(platform), config=paged.make_config(**changes), **settings
  )


@pytest.mark.parametrize(
  ("name", "platform", "changes", "taken"),
  [
    ("auto", "cpu", {}, "xla"),
    ("auto", "tpu", {}, "tpu"),
    ("auto", "gpu", {}, "gpu"),
    ("xla", "tpu", {}, "xla"),
    # What a kernel cannot do, XLA does.
    ("auto", "tpu", {"page_size": 24}, "xla"),
    ("auto", "gpu", {"head_width": 48}, "xla"),
    ("auto", "gpu", {"page_size": 8}, "xla"),
  ],
)
def test_the_devices_decide_unless_the_config_does(
  name, platform, changes, taken, caplog
):
  with caplog.at_level(logging.INFO):
    assert _choose(name, platform, **changes).name == taken
  assert len(caplog.messages) == (name == "auto") + (taken == "gpu")
  if changes:
    assert "must be a" in caplog.text


@pytest.mark.parametrize(
  ("name", "platform", "changes", "message"),
  [
    ("tpu", "cpu", {}, "devices are cpu"),
    ("gpu", "tpu", {}, "devices are tpu"),
    ("splash", "cpu", {}, "'splash' but must be one of"),
    ("tpu", "tpu", {"page_size": 12}, r"generator\.page_size is 12"),
    ("gpu", "gpu", {"page_size": 24}, r"generator\.page_size is 24"),
  ],
)
def test_what_is_named_but_cannot_serve_is_refused(
  name, platform, changes, message
):
  with pytest.raises(ValueError, match=message):
    _choose(name, platform, **changes)


def test_the_config_and_the_choice_know_the_same_names():
  for field in ("generator.attention", "trainer.attention"):
    assert config_lib._CHOICES[field] == kernel_choice.NAMES


def test_an_implementation_is_what_compiled_functions_are_kept_under():
  mesh = tiny.make_mesh(2)
  make_gpu = functools.partial(gpu.GpuAttention, prefills_by="cudnn")
  for kind in (tpu.TpuAttention, make_gpu):
    assert hash(kind(mesh=mesh)) == hash(kind(mesh=tiny.make_mesh(2)))
    assert kind(mesh=mesh) != kind(mesh=tiny.make_mesh(1))
