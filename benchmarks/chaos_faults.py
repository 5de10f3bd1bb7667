"""What a schedule of chaos does to one attempt of a run, drawn by seed."""

import contextlib
import functools
import os
import pathlib
import random
import resource
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import chaos_rewards

# kind -> how often it is drawn.
KINDS: Mapping[str, int] = {
  "kill_anywhere": 4,
  "kill_save": 3,
  "kill_save_called": 2,
  "kill_publish": 3,
  "kill_move": 2,
  "kill_load": 2,
  "kill_step": 3,
  "kill_scoring": 2,
  "sigterm": 3,
  "disk_full": 3,
  "reward_hang": 1,
  "reward_die": 1,
  "reward_raise": 1,
  "reward_nan": 1,
  "fault_generator": 2,
  "fault_trainer": 1,
  "fault_publish": 1,
}
_SITES = {
  "publish": ("dora_jax.weights.store", "WeightStore", "publish"),
  "move": ("dora_jax.generator.lane", "Lane", "extract"),
  "load": ("dora_jax.generator.lane", "Lane", "load"),
  "generator": ("dora_jax.generator.lane", "Lane", "collect"),
  "step": ("dora_jax.trainer.train_step", "Trainer", "train"),
  "trainer": ("dora_jax.trainer.train_step", "Trainer", "train"),
  "save_called": ("dora_jax.checkpoint", "Checkpoints", "save"),
}
_LOOK_S = 0.002


class Injected(RuntimeError):
  """A failure that a schedule asked for."""


def prepare(kind: str, rng: random.Random) -> None:
  """Sets a fault up in the process that is to meet it, before it runs."""
  how, _, what = kind.partition("_")
  if how == "reward" or kind == "kill_scoring":
    word = "kill" if kind == "kill_scoring" else what
    period = rng.choice((3, 5, 7))
    os.environ[chaos_rewards.VARIABLE] = (
      f"{word}:{period}:{rng.randrange(period)}"
    )
  elif kind == "disk_full":
    # The kernel refuses to lengthen a file beyond it, as a quota does.
    most = int(2 ** rng.uniform(9, 17))
    _, ceiling = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, ceiling))
  elif what in _SITES:
    # Moves are few, and chunks many.
    most = {"generator": 60, "move": 2}.get(what, 8)
    _patch(what, rng.randrange(1, most), kills=how == "kill", rng=rng)


def _patch(what: str, nth: int, *, kills: bool, rng: random.Random) -> None:
  """Has the nth call at a site fail, before or after it does its work."""
  module_name, class_name, name = _SITES[what]
  module = __import__(module_name, fromlist=[class_name])
  owner: Any = getattr(module, class_name)
  real: Callable[..., Any] = getattr(owner, name)
  is_before = rng.random() < 0.5
  num_calls = 0

  def strike() -> None:
    if kills:
      os.kill(os.getpid(), signal.SIGKILL)
    raise Injected(f"Call {nth} of {class_name}.{name}")

  @functools.wraps(real)
  def call(*args: Any, **kwargs: Any) -> Any:
    nonlocal num_calls
    num_calls += 1
    is_due = num_calls == nth
    if is_due and is_before:
      strike()
    made = real(*args, **kwargs)
    if is_due:
      strike()
    return made

  setattr(owner, name, call)


def inflict(
  kind: str,
  process: int,
  *,
  workdir: pathlib.Path,
  typical_s: float,
  rng: random.Random,
  limit_s: float,
) -> int | None:
  """Does to a running attempt what comes from outside; waits for its end.

  Returns:
    Its exit status, negative for a signal; None where it was over its limit.
  """
  start_s = time.monotonic()
  strike_s = start_s + rng.uniform(0.0, typical_s)
  number = {
    "kill_anywhere": signal.SIGKILL,
    "kill_save": signal.SIGKILL,
    "sigterm": signal.SIGTERM,
  }.get(kind)
  num_saves = rng.randrange(1, 7)
  while True:
    ended, status = os.waitpid(process, os.WNOHANG)
    if ended:
      return os.waitstatus_to_exitcode(status)
    now_s = time.monotonic()
    if now_s - start_s > limit_s:
      os.killpg(process, signal.SIGKILL)
      os.waitpid(process, 0)
      return None
    if number is not None:
      is_due = now_s >= strike_s
      if kind == "kill_save":
        is_due = _is_saving(workdir, num_saves)
        if is_due:
          time.sleep(rng.uniform(0.0, 0.05))
      if is_due:
        with contextlib.suppress(ProcessLookupError):
          os.kill(process, number)
        number = None
    time.sleep(_LOOK_S)


def _is_saving(workdir: pathlib.Path, num_saves: int) -> bool:
  """Whether a checkpoint of this version or a later one is half written."""
  try:
    names = os.listdir(workdir / "checkpoints")
  except FileNotFoundError:
    return False
  parts = [name for name in names if "tmp" in name]
  return any(int(name.split(".")[0]) >= num_saves for name in parts)
