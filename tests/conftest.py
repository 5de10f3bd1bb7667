"""Every test runs on eight CPU devices, with strict promotion of dtypes.

But for `pytest -m accelerator`, which runs on what JAX finds.
"""

import os
import shutil
import tempfile

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


_COMPILED = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config):
  """Before any test module asks for devices."""
  if config.getoption("markexpr") != "accelerator":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
  # What one test has compiled the others load, in all processes of this
  # session: workers and commands that tests run inherit the environment.
  if _COMPILED not in os.environ:
    config.compiled = tempfile.mkdtemp(prefix="dora_jax_tests_")
    os.environ |= {
      _COMPILED: config.compiled,
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
  jax.config.update("jax_compilation_cache_dir", os.environ[_COMPILED])
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_unconfigure(config):
  """By the process that has made the folder: nobody else is left."""
  if hasattr(config, "compiled"):
    shutil.rmtree(config.compiled)
    del os.environ[_COMPILED]


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
