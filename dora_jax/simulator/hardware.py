"""Data sheets of accelerators; per device, with sources.

Rates are what vendors state: dense bfloat16 arithmetic, all memory channels,
one direction of the links. What a program gets of them is a matter of the
efficiencies in config.cost.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
  """One device.

  Attributes:
    memory_bytes: that it has.
    memory_bytes_per_s: at which it reads them.
    flops_per_s: bfloat16, dense.
    link_bytes_per_s: to other generators' devices, one direction.
    host_bytes_per_s: to the memory of its host, one direction.
  """

  memory_bytes: float
  memory_bytes_per_s: float
  flops_per_s: float
  link_bytes_per_s: float
  host_bytes_per_s: float


# H100, H200: SXM5 data sheets (nvidia.com/en-us/data-center/h100, …/h200), PCIe
# 5 x16 to the host, and one 400 Gbit/s port a device between nodes (DGX H100
# user guide). H800 is H100 with less NVLink, which is not used between nodes.
# v5e, v5p, v6e: cloud.google.com/tpu/docs/v5e, …/v5p, …/v6e; the links are ICI,
# all of a chip's together; the host's share is what one chip of a host of four
# (v5p) or eight gets of PCIe 4 x16, an estimate.
# cpu: a core of a laptop, by guess: calibrated costs do not use it.
ACCELERATORS: dict[str, Accelerator] = {
  "H100": Accelerator(
    memory_bytes=80e9,
    memory_bytes_per_s=3.35e12,
    flops_per_s=989e12,
    link_bytes_per_s=50e9,
    host_bytes_per_s=55e9,
  ),
  "H200": Accelerator(
    memory_bytes=141e9,
    memory_bytes_per_s=4.8e12,
    flops_per_s=989e12,
    link_bytes_per_s=50e9,
    host_bytes_per_s=55e9,
  ),
  "H800": Accelerator(
    memory_bytes=80e9,
    memory_bytes_per_s=3.35e12,
    flops_per_s=989e12,
    link_bytes_per_s=50e9,
    host_bytes_per_s=55e9,
  ),
  "v5e": Accelerator(
    memory_bytes=16e9,
    memory_bytes_per_s=819e9,
    flops_per_s=197e12,
    link_bytes_per_s=100e9,
    host_bytes_per_s=8e9,
  ),
  "v5p": Accelerator(
    memory_bytes=95e9,
    memory_bytes_per_s=2.765e12,
    flops_per_s=459e12,
    link_bytes_per_s=300e9,
    host_bytes_per_s=16e9,
  ),
  "v6e": Accelerator(
    memory_bytes=32e9,
    memory_bytes_per_s=1.64e12,
    flops_per_s=918e12,
    link_bytes_per_s=224e9,
    host_bytes_per_s=8e9,
  ),
  "cpu": Accelerator(
    memory_bytes=4e9,
    memory_bytes_per_s=10e9,
    flops_per_s=100e9,
    link_bytes_per_s=5e9,
    host_bytes_per_s=5e9,
  ),
}


def find(name: str) -> Accelerator:
  """The accelerator of this name.

  Raises:
    ValueError: there is none.
  """
  if name not in ACCELERATORS:
    raise ValueError(
      f"config.cluster.accelerator is {name!r} but must be one of "
      f"{', '.join(map(repr, ACCELERATORS))}."
    )
  return ACCELERATORS[name]
