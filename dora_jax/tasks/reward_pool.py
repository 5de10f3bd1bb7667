"""Scores completions in processes that can be killed.

A reward runs code that hangs, crashes or leaks. So it runs in a process of its
own: one over its deadline is killed, with whatever it started, and replaced, as
is one that runs out of memory or descriptors. What cannot be scored is tried
again, then it is an error, never a reward of 0.
A reward has limits of memory, files and descriptors, an empty folder to work
in, and no network unless asked for (confine.py tells how far that holds).

The processes are plain subprocesses and not those of `multiprocessing`: its
"spawn" imports the parent's main module, and with it JAX, into every child, and
leaves a resource tracker behind.
"""

import collections
import contextlib
import dataclasses
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Mapping
from multiprocessing import connection
from typing import Any

from absl import logging

from dora_jax import types
from dora_jax.tasks import confine

# Importing a reward's libraries takes seconds, on a busy machine many.
_START_TIMEOUT_S = 120.0
# More than a reward needs, and less than what fills a disk.
_FILE_BYTES = 1 << 30
_NUM_FILES = 256
_WORKER_MODULE = "dora_jax.tasks.reward_worker"


class CannotStart(RuntimeError):
  """A worker cannot score at all: there is no such reward, or it fails."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreResult:
  """What became of one job.

  Attributes:
    job: as submitted.
    reward: in the task's own units; None where there is an error.
    components: further numbers that the reward function returned, by name.
    error: why there is no reward, by the last try; None where there is one.
    num_tries: how often it was tried.
  """

  job: Hashable
  reward: float | None
  components: dict[str, float]
  error: str | None
  num_tries: int


@dataclasses.dataclass(kw_only=True, eq=False)
class _Job:
  """What a worker is to score.

  Attributes:
    name: as submitted.
    payload: prompt and completion, pickled.
    num_tries: workers that have got it.
  """

  name: Hashable
  payload: bytes
  num_tries: int = 0


@dataclasses.dataclass(kw_only=True, eq=False)
class _Worker:
  """A process and what it is at.

  Attributes:
    process: leads a process group of its own.
    channel: our end of the pipe.
    is_ready: whether it said that it can score.
    job: what it scores now; None where it starts or waits.
    deadline_s: when it is killed, on the monotonic clock.
  """

  process: subprocess.Popen[bytes]
  channel: connection.Connection
  is_ready: bool = False
  job: _Job | None = None
  deadline_s: float = math.inf


class RewardPool:
  """A constant number of worker processes; submit jobs, poll for results.

  For one thread. Jobs begin as workers become free, within `submit` and `poll`.
  A job's time counts from when a worker that is ready gets it.

  Attributes:
    network_held: by what rewards are kept from the network, confine.ENFORCED or
      confine.GUARDED; empty where they may use it.
    num_replaced: workers that were killed, died or ran out of what they may
      use, and were replaced.
  """

  def __init__(
    self,
    *,
    reward: str,
    reward_kwargs: Mapping[str, Any],
    num_workers: int,
    timeout_s: float,
    memory_bytes: int,
    has_network: bool,
    retries: int,
  ):
    """Starts the workers and waits until all are ready.

    Args:
      reward: name of a reward, or "package.module:function".
      reward_kwargs: further arguments of the reward.
      num_workers: number of processes.
      timeout_s: longest time for one completion.
      memory_bytes: most of the address space of each process; a reward that
        asks for more gets a MemoryError.
      has_network: whether rewards may use the network.
      retries: how often one is tried again after an error, at most.

    Raises:
      CannotStart: says what a worker met.
    """
    if num_workers < 1:
      raise ValueError(
        f"config.task.reward_workers is {num_workers}, but must be at least 1."
      )
    if not timeout_s > 0:
      raise ValueError(
        f"config.task.reward_timeout_s is {timeout_s}, but it must be above 0."
      )
    self._reward = reward
    self._reward_kwargs = dict(reward_kwargs)
    self._timeout_s = timeout_s
    self._limits = confine.Limits(
      memory_bytes=memory_bytes,
      file_bytes=_FILE_BYTES,
      num_files=_NUM_FILES,
    )
    self._has_network = has_network
    self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    self._retries = retries
    self.num_replaced = 0
    self._waiting = collections.deque[_Job]()
    self._pending: set[Hashable] = set()
    self._results: list[ScoreResult] = []
    self._workers: list[_Worker] = []
    self.network_held = ""
    try:
      for _ in range(num_workers):
        self._workers.append(self._start())
      while not all(worker.is_ready for worker in self._workers):
        self._advance(until_s=math.inf)
    # Whatever stops the start, Ctrl-C too, must leave no process behind.
    except BaseException:
      self.close()
      raise
    if self.network_held == confine.GUARDED:
      logging.warning(
        "Rewards are kept from the network %s: this system grants no"
        " namespace. Code that means to get round them can.",
        confine.GUARDED,
      )

  def __enter__(self) -> "RewardPool":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def num_pending(self) -> int:
    """Jobs submitted and not yet returned by `poll`."""
    return len(self._pending)

  def submit(
    self, job: Hashable, prompt: types.Prompt, completion: str
  ) -> None:
    """Takes on a completion, decoded and without its stop token; never waits.

    The job names the result; it must not be pending. The prompt must pickle.
    """
    if not self._workers:
      raise RuntimeError(
        f"The reward pool is closed, so job {job!r} is refused."
      )
    if job in self._pending:
      raise ValueError(
        f"Job {job!r} is already pending; each needs its own name."
      )
    payload = pickle.dumps((prompt, completion))
    self._waiting.append(_Job(name=job, payload=payload))
    self._pending.add(job)
    self._dispatch()

  def poll(self, timeout_s: float) -> list[ScoreResult]:
    """Returns the jobs that are done; waits for the first of them.

    Args:
      timeout_s: longest wait where none is done; 0 only looks.

    Raises:
      CannotStart: a worker that replaced another.
    """
    until_s = time.monotonic() + timeout_s
    while True:
      self._dispatch()
      self._advance(until_s=until_s)
      self._dispatch()
      if self._results or time.monotonic() >= until_s:
        break
    results, self._results = self._results, []
    self._pending -= {result.job for result in results}
    return results

  def close(self) -> None:
    """Kills every worker; what is pending gets no result."""
    for worker in self._workers:
      _end(worker)
    self._workers = []
    self._waiting.clear()
    self._pending.clear()
    self._results.clear()
    self._folder.cleanup()

  def _start(self) -> _Worker:
    ours, theirs = multiprocessing.Pipe()
    # The child must find the user's reward where we would.
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    with theirs:
      process = subprocess.Popen(
        [sys.executable, "-P", "-m", _WORKER_MODULE, str(theirs.fileno())],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=self._folder.name,
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        # A group of its own: it dies with all that it started, and Ctrl-C on
        # the terminal is not sent to it.
        start_new_session=True,
      )
    # Later than the parent's deadline, so that the parent is the one to tell.
    exit_after_s = 2 * self._timeout_s + 5
    ours.send(
      (
        self._reward,
        self._reward_kwargs,
        exit_after_s,
        self._limits,
        self._has_network,
      )
    )
    return _Worker(
      process=process,
      channel=ours,
      deadline_s=time.monotonic() + _START_TIMEOUT_S,
    )

  def _dispatch(self) -> None:
    """Gives waiting jobs to workers that are free."""
    for worker in list(self._workers):
      if not self._waiting:
        return
      if not worker.is_ready or worker.job is not None:
        continue
      job = self._waiting[0]
      try:
        worker.channel.send_bytes(job.payload)
      except OSError:
        # It died while it had nothing to do; the job stays with us.
        self._replace(worker)
        continue
      self._waiting.popleft()
      job.num_tries += 1
      worker.job = job
      worker.deadline_s = time.monotonic() + self._timeout_s

  def _advance(self, *, until_s: float) -> None:
    """Waits for a reply or a deadline; takes replies, ends what is overdue."""
    wake_s = min(until_s, *(worker.deadline_s for worker in self._workers))
    wait_s = max(0.0, wake_s - time.monotonic())
    channels = [worker.channel for worker in self._workers]
    ready = connection.wait(channels, None if math.isinf(wait_s) else wait_s)
    # Replies first: one that came in time counts, however late it is read.
    for worker in list(self._workers):
      if worker.channel in ready:
        self._take_reply(worker)
    for worker in list(self._workers):
      if worker.deadline_s <= time.monotonic():
        self._replace(worker)

  def _take_reply(self, worker: _Worker) -> None:
    try:
      kind, value, components, message, is_spent = worker.channel.recv()
    except (EOFError, OSError):
      self._replace(worker)
      return
    if kind == "failed":
      raise CannotStart(
        f"The reward {self._reward!r} (config.task.reward) cannot start:"
        f" {message}"
      )
    if kind == "ready":
      worker.is_ready = True
      self.network_held = message
    else:
      assert worker.job is not None
      if kind == "scored":
        self._finish(worker.job, value, components, None)
      else:
        self._fail(worker.job, message)
    worker.job = None
    worker.deadline_s = math.inf
    if is_spent:
      self._replace(worker)

  def _fail(self, job: _Job, error: str) -> None:
    """Puts a job back into the line, or gives it up after its last try."""
    if job.num_tries <= self._retries:
      # Behind all others: what hangs keeps no worker from them.
      self._waiting.append(job)
    else:
      self._finish(job, None, {}, error)

  def _finish(
    self,
    job: _Job,
    reward: float | None,
    components: dict[str, float],
    error: str | None,
  ) -> None:
    self._results.append(
      ScoreResult(
        job=job.name,
        reward=reward,
        components=components,
        error=error,
        num_tries=job.num_tries,
      )
    )

  def _replace(self, worker: _Worker) -> None:
    """Kills a worker that is dead or overdue; its job becomes an error."""
    is_overdue = worker.deadline_s <= time.monotonic()
    _end(worker)
    code = worker.process.returncode
    ending = f"signal {-code}" if code < 0 else f"exit status {code}"
    if not worker.is_ready:
      limit = f"after {_START_TIMEOUT_S} s" if is_overdue else f"({ending})"
      raise CannotStart(
        f"A worker of reward {self._reward!r} (config.task.reward) ended"
        f" {limit} before it was ready."
      )
    if worker.job is not None:
      error = (
        f"timed out after {self._timeout_s} s (config.task.reward_timeout_s)"
        if is_overdue
        else f"worker died ({ending})"
      )
      self._fail(worker.job, error)
    logging.warning("Reward worker %d is replaced.", worker.process.pid)
    self.num_replaced += 1
    self._workers[self._workers.index(worker)] = self._start()


def _end(worker: _Worker) -> None:
  """Kills a worker with all that it started; waits until it is gone."""
  worker.channel.close()
  if worker.process.returncode is not None:
    return
  # Not reaped yet, so that its number cannot be another's. Some systems refuse
  # to signal a group of which only the dead leader is left.
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(worker.process.pid, signal.SIGKILL)
  worker.process.wait()
