"""Measures how many events a second the coordinator decides on, on one core.

  python -m benchmarks.coordinator --out=DIR [--events=1000000] \
    [--generators=64,512,4096] [--live=32768]

The live trajectories are the same for every fleet (a smaller one has more slots
a generator), so what grows with the fleet is the cost of the fleet. Nothing is
generated: a heap of due times stands for the cluster. Events are what a run
sends: Finished and Scored of each trajectory, Progress of every generator now
and then, Loaded, Moved, StepDone.

Times are CPU seconds of this one thread, so that other work on the machine does
not count; nothing here waits.
"""

import argparse
import array
import collections
import heapq
import pathlib
import shlex
import sys
import time
import tracemalloc
from collections.abc import Sequence

import numpy as np

from dora_jax.coordinator import balance, coordinator
from dora_jax.coordinator import events as ev
from dora_jax.coordinator.schedules import base, dora
from dora_jax.runtime import summary

_GROUP_SIZE = 16
_MAX_STALENESS = 3
_MEAN_LENGTH = 2400
_LIMIT = 30_000
# Virtual time is in decode steps. The trainer is a little faster than rollout.
_LOAD_STEPS, _MOVE_STEPS, _PROGRESS_STEPS = 30.0, 10.0, 8000.0
_TRAIN_SHARE = 0.9
# Events of the run under tracemalloc, which is ten times slower, and its looks.
_MEMORY_EVENTS, _MEMORY_LOOKS = 600_000, 6


class Cluster:
  """Sends a coordinator the events that a cluster of generators would.

  Attributes:
    coordinator: that is measured.
    handle_s: seconds that each call of handle() took.
    counts: class of event -> how many were sent.
    num_moved: requests that moves carried.
  """

  def __init__(self, *, num_generators: int, num_live: int, seed: int = 0):
    """Lets all generators join.

    Args:
      num_generators: lanes alone on their meshes.
      num_live: slots of all of them together; groups are started to fill them.
      seed: of the lengths.
    """
    self._slots = num_live // num_generators
    groups = num_live // _GROUP_SIZE
    # Half of what is live is trained on at each step.
    self._prompts_per_batch = max(1, groups // 2)
    self.coordinator = coordinator.Coordinator(
      schedule=dora.Dora(
        base.Options(
          max_staleness=_MAX_STALENESS,
          prompts_per_batch=self._prompts_per_batch,
          rollout_groups=groups,
          oversample=1.0,
          evict=False,
        )
      ),
      balance_settings=balance.Settings(
        repartition=True,
        moves=True,
        filling=True,
        on_step=True,
        kv_pressure=0.9,
        period_s=0.0,
        weight_bytes=64 * 10**9,
        kv_token_bytes=256 * 1024,
      ),
      group_size=_GROUP_SIZE,
      prompts_per_batch=self._prompts_per_batch,
      num_steps=10**9,
    )
    lengths = np.random.default_rng(seed).lognormal(0.0, 1.2, 1 << 16)
    lengths *= _MEAN_LENGTH / lengths.mean()
    self._lengths = np.clip(lengths, 1, _LIMIT).astype(int).tolist()
    self._step_s = (
      _TRAIN_SHARE * _MEAN_LENGTH * self._prompts_per_batch / groups
    )
    self._due: list[tuple[float, int, object]] = []
    self._order = 0
    self._now_s = 0.0
    self._where: dict[tuple[int, int], int] = {}
    self._versions = [0] * num_generators
    self.handle_s = array.array("d")
    self.counts: collections.Counter[str] = collections.Counter()
    self.num_moved = 0
    for generator_id in range(num_generators):
      self._send(
        ev.GeneratorJoined(
          generator_id=generator_id,
          num_slots=self._slots,
          mesh_id=generator_id,
          kv_capacity=self._slots * _LIMIT,
        )
      )
      delay_s = _PROGRESS_STEPS * (generator_id + 1) / num_generators
      self._after(delay_s, generator_id)

  def run(self, num_events: int) -> None:
    """Sends events until that many have been sent in all."""
    while len(self.handle_s) < num_events:
      self._now_s, _, what = heapq.heappop(self._due)
      match what:
        case (group_id, member, num_tokens):
          self._finish(group_id, member, num_tokens)
        case int():
          self._report(what)
        case ev.Move():
          self._move(what)
        case ev.Loaded():
          self._versions[what.generator_id] = what.version
          self._send(what)
        case ev.StepDone():
          self._send(what)

  def _after(self, delay_s: float, what: object) -> None:
    self._order += 1
    heapq.heappush(self._due, (self._now_s + delay_s, self._order, what))

  def _send(self, event: ev.Event) -> None:
    start_s = time.thread_time()
    commands = self.coordinator.handle(event, self._now_s)
    self.handle_s.append(time.thread_time() - start_s)
    self.counts[type(event).__name__] += 1
    for command in commands:
      self._carry_out(command)

  def _carry_out(self, command: ev.Command) -> None:
    match command:
      case ev.Submit():
        for member in command.members:
          request = command.group_id, member
          self._where[request] = command.generator_id
          num_tokens = self._lengths[hash(request) & 0xFFFF]
          self._after(num_tokens, (*request, num_tokens))
      case ev.Score():
        self._send(ev.Scored(group_id=command.group_id, member=command.member))
      case ev.Load():
        self._after(
          _LOAD_STEPS,
          ev.Loaded(generator_id=command.generator_id, version=command.version),
        )
      case ev.Move():
        self._after(_MOVE_STEPS, command)
      case ev.Train():
        self._after(self._step_s, ev.StepDone(version=command.step + 1))

  def _finish(self, group_id: int, member: int, num_tokens: int) -> None:
    generator_id = self._where.pop((group_id, member))
    self._send(
      ev.Finished(
        generator_id=generator_id,
        group_id=group_id,
        member=member,
        version=self._versions[generator_id],
        num_tokens=num_tokens,
      )
    )

  def _move(self, move: ev.Move) -> None:
    moved = tuple(r for r in move.requests if r in self._where)
    self._where |= dict.fromkeys(moved, move.target_id)
    self.num_moved += len(moved)
    self._send(
      ev.Moved(
        source_id=move.source_id,
        target_id=move.target_id,
        moved=moved,
        left=tuple(r for r in move.requests if r not in moved),
        num_kv_tokens=_MEAN_LENGTH * len(moved),
      )
    )

  def _report(self, generator_id: int) -> None:
    view = self.coordinator.fleet[generator_id]
    num_kv_tokens = _MEAN_LENGTH * len(view.residents)
    self._send(
      ev.Progress(
        generator_id=generator_id,
        num_sampled=0,
        num_kv_tokens=num_kv_tokens,
        num_waiting=0,
        pages_used=num_kv_tokens,
        num_pages=view.kv_capacity,
      )
    )
    self._after(_PROGRESS_STEPS, generator_id)


def measure_speed(
  *, num_generators: int, num_live: int, num_events: int
) -> dict[str, float]:
  """Sends the events and takes the time.

  Returns:
    events_per_s: by the time inside of handle() alone.
    events_per_s_driven: by the time of the whole loop, this file's included.
    p50_us, p99_us, max_us: of one call of handle(), in microseconds.
    steps, moved, loads, progress: how often these happened.
    lag_mean: in versions, at training.
  """
  start_s = time.thread_time()
  cluster = Cluster(num_generators=num_generators, num_live=num_live)
  cluster.run(num_events)
  driven_s = time.thread_time() - start_s
  handle_s = np.frombuffer(cluster.handle_s)
  p50_s, p99_s = np.quantile(handle_s, [0.5, 0.99])
  ledger = cluster.coordinator.ledger
  lags = [lag * count for lag, count in ledger.lag_counts.items()]
  return {
    "events_per_s": len(handle_s) / handle_s.sum(),
    "events_per_s_driven": len(handle_s) / driven_s,
    "p50_us": 1e6 * p50_s,
    "p99_us": 1e6 * p99_s,
    "max_us": 1e6 * handle_s.max(),
    "steps": cluster.coordinator.newest_version,
    "moved": cluster.num_moved,
    "loads": cluster.counts["Loaded"],
    "progress": cluster.counts["Progress"],
    "lag_mean": sum(lags) / max(ledger.lag_counts.total(), 1),
  }


def measure_memory(
  *, num_generators: int, num_live: int, num_events: int = _MEMORY_EVENTS
) -> dict[str, float]:
  """Counts what the coordinator's own lines have allocated and still hold.

  Returns:
    bytes_per_live: the most at any look, of each live trajectory.
    bytes_growth: the last look over that at half of the events: 1 where memory
      is flat.
  """
  tracemalloc.start()
  cluster = Cluster(num_generators=num_generators, num_live=num_live)
  held = []
  for look in range(1, _MEMORY_LOOKS + 1):
    cluster.run(num_events * look // _MEMORY_LOOKS)
    snapshot = tracemalloc.take_snapshot().filter_traces(
      [tracemalloc.Filter(True, "*/dora_jax/coordinator/*")]
    )
    held.append(sum(trace.size for trace in snapshot.traces))
  tracemalloc.stop()
  return {
    "bytes_per_live": max(held) / num_live,
    "bytes_growth": held[-1] / held[_MEMORY_LOOKS // 2 - 1],
  }


def main(arguments: Sequence[str] | None = None) -> None:
  """Measures every size of fleet, prints a table and writes summary.json."""
  parser = argparse.ArgumentParser(description=main.__doc__)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--events", type=int, default=1_000_000)
  parser.add_argument("--generators", default="64,512,4096")
  parser.add_argument("--live", type=int, default=32_768)
  options = parser.parse_args(arguments)
  values: dict[str, float] = {}
  for num_generators in map(int, options.generators.split(",")):
    size = {"num_generators": num_generators, "num_live": options.live}
    measured = measure_speed(**size, num_events=options.events)
    measured |= measure_memory(
      **size, num_events=min(_MEMORY_EVENTS, options.events)
    )
    print(f"{num_generators} generators:", flush=True)
    for name, value in measured.items():
      print(f"  {name:<20} {value:>14,.2f}", flush=True)
      values[f"{name}/{num_generators}"] = value
  command = shlex.join(
    ["python", "-m", "benchmarks.coordinator", *sys.argv[1:]]
  )
  summary.write_summary(options.out, values, command=command)


if __name__ == "__main__":
  main()
