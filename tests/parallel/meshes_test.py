"""Devices are split as asked, for any sizes, or refused with the numbers."""

import hypothesis
import jax
import pytest
from hypothesis import strategies

from dora_jax.parallel import meshes

_SIZES = strategies.integers(1, 4)


def _split(
  fsdp, tensor, num_generators, generator_tensor, *, colocated, sequence=1
):
  return meshes.split_devices(
    jax.devices(),
    trainer_fsdp=fsdp,
    trainer_sequence=sequence,
    trainer_tensor=tensor,
    num_generators=num_generators,
    generator_tensor=generator_tensor,
    colocated=colocated,
  )


@hypothesis.given(_SIZES, strategies.integers(1, 2), _SIZES, _SIZES, _SIZES)
def test_meshes_are_disjoint_and_in_order_or_refused(
  fsdp, sequence, tensor, num, size
):
  needed = fsdp * sequence * tensor + num * size
  split = lambda: _split(
    fsdp, tensor, num, size, colocated=False, sequence=sequence
  )
  if needed > 8:
    with pytest.raises(ValueError, match=rf"need {needed} devices.*are 8"):
      split()
    return
  found = split()
  shape = {"fsdp": fsdp, "sequence": sequence, "tensor": tensor}
  assert found.trainer.shape == shape
  assert [mesh.shape for mesh in found.generators] == [{"tensor": size}] * num
  used = [*found.trainer.devices.flat]
  for mesh in found.generators:
    used += mesh.devices.flat
  assert used == jax.devices()[:needed]


@hypothesis.given(_SIZES, _SIZES, _SIZES)
def test_colocated_generators_share_the_trainers_devices(fsdp, num, size):
  if fsdp % size:
    with pytest.raises(ValueError, match=f"generator_tensor is {size}"):
      _split(fsdp, 1, num, size, colocated=True)
    return
  found = _split(fsdp, 1, num, size, colocated=True)
  trainer = set(found.trainer.devices.flat)
  assert all(set(mesh.devices.flat) <= trainer for mesh in found.generators)
  assert len(found.generators) == num


def test_counts_below_one_are_refused():
  with pytest.raises(ValueError, match=r"config.mesh.num_generators is 0"):
    _split(1, 1, 0, 1, colocated=True)
