"""How the C library keeps the host's memory."""

import ctypes
import sys

# Of mallopt(3).
_M_ARENA_MAX = -8


def share_arena() -> bool:
  """Lets all threads allocate from one arena; before they are started.

  glibc gives threads arenas of their own, and what one frees is not given to
  another. Over thousands of steps a process grows by megabytes at a time that
  nothing holds, which hides what something does hold.

  Returns:
    Whether it is so: elsewhere than in glibc there is no such thing.
  """
  if not sys.platform.startswith("linux"):
    return False
  library = ctypes.CDLL(None)
  if not hasattr(library, "mallopt"):
    return False
  return bool(library.mallopt(_M_ARENA_MAX, 1))
