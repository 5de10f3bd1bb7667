import subprocess
import sys

import pytest

# Allocates in four threads at once, then counts the arenas that glibc tells of.
_COUNT_ARENAS = """
import ctypes, sys, threading
from dora_jax import host_memory

shares = sys.argv[1] == "share"
assert not shares or host_memory.share_arena()
library = ctypes.CDLL(None)
library.malloc.restype = library.fopen.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
barrier = threading.Barrier(4)

def allocate():
  barrier.wait()
  pointers = [library.malloc(1000) for _ in range(1000)]
  barrier.wait()
  for pointer in pointers:
    library.free(pointer)

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
  thread.start()
for thread in threads:
  thread.join()
file = ctypes.c_void_p(library.fopen(sys.argv[2].encode(), b"w"))
library.malloc_info(0, file)
library.fclose(file)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's alone")
def test_threads_share_one_arena(tmp_path):
  counts = []
  for how in ("apart", "share"):
    report = tmp_path / how
    subprocess.run(
      [sys.executable, "-c", _COUNT_ARENAS, how, str(report)], check=True
    )
    counts.append(report.read_text().count("<heap nr="))
  assert counts[0] > 1 and counts[1] == 1
