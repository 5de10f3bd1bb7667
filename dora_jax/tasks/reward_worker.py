"""A process that scores completions, one after another, until its pipe closes.

Started by reward_pool.py. It holds no JAX, so that it starts at once and takes
no device.
"""

import faulthandler
import os
import pickle
import signal
import sys
from multiprocessing import connection
from typing import Literal

from dora_jax.tasks import rewards

# What a worker sends: that it is ready, that it cannot start, what it scored.
Reply = tuple[
  Literal["ready", "failed", "scored", "error"], float, dict[str, float], str
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
  name, kwargs, exit_after_s = channel.recv()
  try:
    reward = rewards.build(name, kwargs)
  # Whatever a user's module raises as it is imported is for the parent to tell.
  except Exception as error:
    channel.send(("failed", 0.0, {}, describe(error)))
    return
  channel.send(("ready", 0.0, {}, ""))
  while True:
    channel.send(score(reward, channel.recv_bytes(), exit_after_s=exit_after_s))


def score(
  reward: rewards.Reward, payload: bytes, *, exit_after_s: float
) -> Reply:
  """Scores one pickled pair (prompt, completion)."""
  # The parent ends a worker that hangs. Should the parent be dead, the worker
  # ends itself; a timer in C also works where Python is stuck.
  faulthandler.dump_traceback_later(exit_after_s, exit=True)
  try:
    prompt, completion = pickle.loads(payload)
    value, components = rewards.check_score(reward(prompt, completion))
  # Any failure of a reward is a result: the completion has no score, not 0.
  except (Exception, SystemExit) as error:
    return "error", 0.0, {}, describe(error)
  finally:
    faulthandler.cancel_dump_traceback_later()
  return "scored", value, components, ""


def describe(error: BaseException) -> str:
  """Type and message of an exception."""
  return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
  main()
