"""A process that scores completions, one after another, until its pipe closes.

Started by reward_pool.py. It holds no JAX, so that it starts at once and takes
no device. Before it imports a reward it lowers what it may use and, unless the
reward asks for it, leaves the network.
"""

import errno
import faulthandler
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, Literal

from dora_jax.tasks import confine

_LONGEST_MESSAGE = 1000
# What a worker sends: that it is ready, that it cannot start, what it scored;
# and last whether it is spent, and another should take its place.
Reply = tuple[
  Literal["ready", "failed", "scored", "error"],
  float,
  dict[str, float],
  str,
  bool,
]


def main() -> None:
  """Serves the pipe whose descriptor is the only argument."""
  # Ctrl-C is for the parent, which then closes the pipe.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  descriptor = int(sys.argv[1])
  # A process that a reward forks off must not keep the pipe open.
  os.set_inheritable(descriptor, False)
  with connection.Connection(descriptor) as channel:
    try:
      serve(channel)
    except (EOFError, ConnectionError):
      # The parent is gone, or wants no more.
      return


def serve(channel: connection.Connection) -> None:
  """Reads what to score by, says that it is ready, then scores for ever."""
  name, kwargs, exit_after_s, limits, has_network = channel.recv()
  confine.limit(limits)
  held = "" if has_network else confine.leave_network()
  # Only now, for what it imports starts threads, and confine wants one.
  from dora_jax.tasks import rewards

  try:
    reward = rewards.build(name, kwargs)
  # Whatever a user's module raises as it is imported is for the parent to tell.
  except Exception as error:
    channel.send(("failed", 0.0, {}, describe(error), False))
    return

  def judge(prompt: Any, completion: str) -> tuple[float, dict[str, float]]:
    return rewards.check_score(reward(prompt, completion))

  channel.send(("ready", 0.0, {}, held, False))
  while True:
    reply = score(judge, channel.recv_bytes(), exit_after_s=exit_after_s)
    channel.send((*reply[:-1], reply[-1] or _leaks(limits.num_files)))


def score(
  judge: Callable[..., tuple[float, dict[str, float]]],
  payload: bytes,
  *,
  exit_after_s: float,
) -> Reply:
  """Scores one pickled pair (prompt, completion)."""
  # The parent ends a worker that hangs. Should the parent be dead, the worker
  # ends itself; a timer in C also works where Python is stuck.
  faulthandler.dump_traceback_later(exit_after_s, exit=True)
  try:
    value, components = judge(*pickle.loads(payload))
  # Any failure of a reward is a result: the completion has no score, not 0.
  except (Exception, SystemExit) as error:
    return "error", 0.0, {}, describe(error), _is_exhausted(error)
  finally:
    faulthandler.cancel_dump_traceback_later()
  return "scored", value, components, "", False


def _is_exhausted(error: BaseException) -> bool:
  """Whether what comes next may fail by what this one has not given back."""
  return isinstance(error, MemoryError) or (
    isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
  )


def _leaks(num_files: int) -> bool:
  """Whether over half of the descriptors are in use between two completions."""
  # A system gives out the lowest that is free.
  try:
    descriptor = os.open(os.devnull, os.O_RDONLY)
  except OSError:
    return True
  os.close(descriptor)
  return descriptor > num_files // 2


def describe(error: BaseException) -> str:
  """Type and message of an exception, of a length that a log can take."""
  try:
    message = str(error)
  # The class may be a user's, and its text fail in any way.
  except Exception as worse:
    message = f"(its text raises {type(worse).__name__})"
  if len(message) > _LONGEST_MESSAGE:
    message = f"{message[:_LONGEST_MESSAGE]} … ({len(message)} characters)"
  return f"{type(error).__name__}: {message}"


if __name__ == "__main__":
  main()
