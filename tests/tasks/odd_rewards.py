"""Rewards that misbehave, found by the pool's workers by import path."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading


def behave(prompt, completion, *, how="one"):
  """Does what the completion says."""
  if completion == "hang":
    threading.Event().wait()
  if completion == "hang with a child":
    subprocess.run([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    threading.Event().wait()
  if completion == "raise":
    raise KeyError("no such unit")
  if completion == "die":
    os.kill(os.getpid(), signal.SIGKILL)
  if completion == "exit":
    sys.exit(3)
  if completion == "exit at once":
    os._exit(3)
  if completion == "jax":
    return float("jax" in sys.modules)
  if completion == "memory":
    return float(len(bytearray(8 << 30)))
  if completion == "files":
    return float(len([os.open(os.devnull, os.O_RDONLY) for _ in range(999)]))
  if completion == "leak":
    [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
    return 1.0
  if completion == "network":
    socket.create_connection(("127.0.0.1", 9), timeout=1.0)
  if completion == "folder":
    return float(not os.listdir())
  if completion == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    return 1.0
  values = {
    "one": 1,
    "nan": float("nan"),
    "inf": float("inf"),
    "str": "1",
    "bool": True,
    "none": None,
    "parts": {"reward": 0.5, "format": 1.0},
    "partless": {"format": 1.0},
    "numbered": {"reward": 1.0, 7: 1.0},
    "huge": 1e300,
    "list": [1.0, 1.0],
    "length": len(prompt.tokens),
  }
  return values[completion]


def wait_for_second_try(prompt, completion, *, folder):
  """Fails as the completion says, but only the first time."""
  path = pathlib.Path(folder) / completion.replace(" ", "_")
  if path.exists() and "twice" not in completion:
    return 1.0
  path.touch()
  return behave(prompt, completion)
