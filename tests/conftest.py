"""Every test runs on eight CPU devices, with strict promotion of dtypes.

But for `pytest -m accelerator`, which runs on what JAX finds.
"""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
  """Before any test module asks for devices."""
  if config.getoption("markexpr") != "accelerator":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True)
def _leave_no_thread_behind():
  """A test that ends with a live thread of ours has hidden a hang."""
  import threading

  before = set(threading.enumerate())
  yield
  left = [
    t
    for t in set(threading.enumerate()) - before
    if t.name.startswith("dora_jax") and t.is_alive()
  ]
  assert not left, f"threads still alive: {[t.name for t in left]}"
