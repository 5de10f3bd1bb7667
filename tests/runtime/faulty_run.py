"""A run by the command line in which one thing goes wrong; its own process.

  python -m tests.runtime.faulty_run CASE --config=… --workdir=…

Each case changes one boundary of the real parts.
"""

import sys
import threading
from typing import Any

import jax
from absl import app

from dora_jax import main
from dora_jax.generator import engine
from dora_jax.trainer import train_step

_NUM_CHUNKS = 5


def break_engines(*, number: int | None, hangs: bool) -> None:
  """Lets engines fail or hang after some chunks: one of them, or all."""
  engines: Any = engine.Engine
  decode = engines.decode
  calls: dict[int, int] = {}

  def broken(self, *arguments, **options):
    calls[id(self)] = calls.get(id(self), 0) + 1
    is_meant = number is None or list(calls).index(id(self)) == number
    if is_meant and calls[id(self)] > _NUM_CHUNKS:
      if hangs:
        threading.Event().wait()
      raise jax.errors.JaxRuntimeError("INTERNAL: the device has gone")
    return decode(self, *arguments, **options)

  engines.decode = broken


def break_trainer() -> None:
  """Lets the second step fail."""
  trainers: Any = train_step.Trainer
  train = trainers.train

  def broken(self, groups):
    if self.version == 1:
      raise jax.errors.JaxRuntimeError("INTERNAL: the device has gone")
    return train(self, groups)

  trainers.train = broken


def change(case: str) -> None:
  """Brings about what the case is called after."""
  match case:
    case "one generator":
      break_engines(number=1, hangs=False)
    case "all generators":
      break_engines(number=None, hangs=False)
    case "hang":
      break_engines(number=None, hangs=True)
    case "trainer":
      break_trainer()
    case "rewards" | "nothing":
      pass  # The former by the config's reward function.
    case _:
      raise ValueError(f"No case is called {case!r}.")


if __name__ == "__main__":
  change(sys.argv.pop(1))
  main.define_flags()
  app.run(main.main)
