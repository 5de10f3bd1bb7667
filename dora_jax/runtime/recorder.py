"""Everything that a run leaves behind: metrics, samples, summary, progress."""

import collections
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from absl import logging

from dora_jax import metrics as metrics_lib
from dora_jax import trace, types
from dora_jax.coordinator import coordinator as coordinator_lib
from dora_jax.coordinator import ledger as ledger_lib
from dora_jax.runtime import evaluation as evaluation_lib
from dora_jax.runtime import generating, progress, summary
from dora_jax.trainer import train_step
from dora_jax.weights import store as store_lib

# Shorter waits come and go too fast to be read.
_LONG_WAIT_S = 0.5


class Recorder:
  """Counts and writes; decides nothing. Used by the runtime's thread.

  Attributes:
    num_mixed: trajectories with a token that another version sampled.
    num_resumes: times that the run was resumed.
  """

  def __init__(
    self,
    *,
    workdir: pathlib.Path,
    coordinator: coordinator_lib.Coordinator,
    timeline: trace.Trace,
    num_steps: int,
    decode: Callable[[Sequence[int]], str],
    generators: Sequence[generating.GeneratorPart],
    store: store_lib.WeightStore,
    further: Callable[[], Mapping[str, float]],
    stream: TextIO = sys.stdout,
  ):
    self.num_mixed = self.num_resumes = 0
    # Of the attempts that this one resumes.
    self._before_s = 0.0
    self._generator_before_s = self._generator_busy_before_s = 0.0
    self._workdir = workdir
    self._coordinator = coordinator
    self._trace = timeline
    self._decode = decode
    self._generators = generators
    self._store = store
    self._further = further
    self._metrics = metrics_lib.MetricsWriter(workdir)
    self._progress = progress.Progress(num_steps, stream)
    self._start_s = time.perf_counter()
    self._last_s = self._start_s
    self._trained_tokens = 0
    self._sampled_tokens = 0
    self._last_tokens = 0
    self._reward: float | None = None
    self._lag_mean: float | None = None
    self._accuracies: dict[int, float] = {}
    self._evaluates_last = True
    self._mismatch_sum, self._num_mismatches = 0.0, 0
    self._waits_since_s: dict[tuple[str, str], float] = {}
    self._score_errors: collections.Counter[str] = collections.Counter()
    folder = workdir / "trajectories"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sampled.jsonl"
    self._last_sampled_step = metrics_lib.mend(path)
    self._samples = path.open("a", encoding="utf-8")

  def start_clock(self) -> None:
    """Marks the beginning of what `seconds` counts beside earlier attempts."""
    self._start_s = self._last_s = time.perf_counter()

  def state(self) -> dict[str, Any]:
    """What the summary needs of the run so far, JSON-able."""
    now_s = time.perf_counter()
    return {
      "seconds": self._seconds(now_s),
      "generator_s": self._generator_s(now_s),
      "generator_busy_s": self._generator_busy_s(),
      "num_resumes": self.num_resumes,
      "num_mixed": self.num_mixed,
      "trained_tokens": self._trained_tokens,
      "sampled_tokens": self._sampled_tokens,
      "accuracies": [list(pair) for pair in self._accuracies.items()],
      "score_errors": dict(self._score_errors),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on counting from a state."""
    self._before_s = state["seconds"]
    self._generator_before_s = state["generator_s"]
    self._generator_busy_before_s = state["generator_busy_s"]
    self.num_resumes = state["num_resumes"] + 1
    self.num_mixed = state["num_mixed"]
    self._trained_tokens = self._last_tokens = state["trained_tokens"]
    self._sampled_tokens = state["sampled_tokens"]
    self._accuracies = dict(map(tuple, state["accuracies"]))
    self._score_errors = collections.Counter(state["score_errors"])

  def note(self, text: str) -> None:
    """Prints a line that stays."""
    self._progress.note(text)

  def trajectory(self, trajectory: types.Trajectory) -> None:
    """Counts a finished trajectory, and checks C1 by the engine's stamps."""
    self._sampled_tokens += len(trajectory.completion)
    if (trajectory.token_versions != trajectory.version).any():
      self.num_mixed += 1

  def score_error(self, group_id: int, member: int, error: str) -> None:
    """Counts a reward that could not be had; logs each kind once by id."""
    kind = error.split(":")[0]
    self._score_errors[kind] += 1
    if self._score_errors[kind] == 1:
      logging.error(
        "Group %d, member %d could not be scored, and its group is replaced: "
        "%s (further ones of this kind are only counted)",
        group_id,
        member,
        progress.printable(error),
      )

  def batch(self, groups: Sequence[types.Group], *, step: int) -> None:
    """Counts the tokens of a batch and writes down its first trajectory."""
    for group in groups:
      for trajectory in group.trajectories:
        self._trained_tokens += len(trajectory.prompt)
        self._trained_tokens += len(trajectory.completion)
    group, trajectory = groups[0], groups[0].trajectories[0]
    line = {
      "step": step,
      "group_id": group.group_id,
      "version": trajectory.version,
      "lag": step - trajectory.version,
      "prompt": group.prompt.text,
      "completion": self._decode(trajectory.completion.tolist()),
      "answer": group.prompt.answer,
      "reward": float(group.rewards[0]),
      "finish_reason": trajectory.finish_reason,
      "prompt_tokens": trajectory.prompt.tolist(),
      "completion_tokens": trajectory.completion.tolist(),
      "behavior_logprobs": trajectory.behavior_logprobs.tolist(),
    }
    if step <= self._last_sampled_step:
      line["resumed"] = True  # As in metrics.jsonl.
    self._samples.write(json.dumps(line) + "\n")

  def step(self, version: int, values: Mapping[str, float]) -> None:
    """Writes what a step measured."""
    now_s = time.perf_counter()
    alive = self._coordinator.versions_alive()
    waits = self._coordinator.trainer_wait_s
    ledger = self._coordinator.ledger
    fleet, balancer = self._coordinator.fleet, self._coordinator.balancer
    tokens = self._trained_tokens - self._last_tokens
    self._reward = values["train/reward_mean"]
    self._lag_mean = values["train/lag_mean"]
    # A step without a fresh trajectory, and none recomputed, measures none.
    if "train/mismatch_kl_k3" in values:
      self._mismatch_sum += values["train/mismatch_kl_k3"]
      self._num_mismatches += 1
    self._metrics.write(
      version,
      {
        **values,
        "rollout/tokens_per_s": tokens / (now_s - self._last_s),
        "rollout/sampled_tokens": self._sampled_tokens,
        "rollout/versions_alive": len(alive),
        "rollout/groups_open": len(ledger.open),
        "rollout/groups_ready": len(ledger.ready),
        "rollout/groups_dropped": ledger.num_dropped(),
        "rollout/generator_idle_share": self._idle_share(now_s),
        "rollout/mixed": self.num_mixed,
        **self._lane_counts(),
        **self._copies(),
        **self._further(),
        "rollout/trainer_wait_data_s": waits["data"],
        "rollout/trainer_wait_straggler_s": waits["straggler"],
        **{
          f"rollout/generator_wait_{cause}_s": seconds
          for cause, seconds in fleet.wait_s.items()
        },
        **{
          f"rollout/balanced_on_{trigger}": count
          for trigger, count in balancer.counts.items()
        },
        **{
          f"ledger/{name.replace('/', '_')}": value
          for name, value in ledger_values(self._coordinator).items()
        },
      },
    )
    self._trace.counter("reward", now_s, mean=self._reward)
    self._trace.counter("versions alive", now_s, count=len(alive))
    self._last_s, self._last_tokens = now_s, self._trained_tokens

  def evaluation(self, result: evaluation_lib.Result) -> None:
    """Writes what an evaluation measured."""
    self._accuracies[result.version] = result.accuracy
    self._metrics.write(
      result.version,
      {
        "evaluation/accuracy": result.accuracy,
        "evaluation/reward_mean": result.reward_mean,
        "evaluation/length_mean": result.length_mean,
        "evaluation/failed": result.num_failed,
      },
    )
    self.note(
      f"version {result.version}: {result.accuracy:.1%} of "
      f"{result.num_scored} held-out completions solved"
    )

  def end_evaluations(self) -> None:
    """No version is evaluated any more: none is that after the run."""
    self._evaluates_last = False

  def refresh(self) -> None:
    """Shows where the run stands."""
    now_s = time.perf_counter()
    pairs = self._coordinator.waits()
    self._waits_since_s = {
      pair: self._waits_since_s.get(pair, now_s) for pair in pairs
    }
    waits = sorted(self._waits_since_s.items(), key=lambda item: item[1])
    version = self._coordinator.newest_version
    self._progress.update(
      progress.Status(
        step=version,
        reward=self._reward,
        accuracy=self._accuracies[max(self._accuracies)]
        if self._accuracies
        else None,
        tokens_per_s=self._trained_tokens / max(self._seconds(now_s), 1e-9),
        versions_alive=tuple(self._coordinator.versions_alive()),
        lag_mean=self._lag_mean,
        waits=tuple(
          progress.Wait(who=who, what=what, waited_s=now_s - since_s)
          for (who, what), since_s in waits[:3]
          if now_s - since_s > _LONG_WAIT_S
        ),
      )
    )

  def summarise(self, *, extra: Mapping[str, float], command: str) -> list[str]:
    """Writes summary.json, prints the closing table.

    Returns:
      The promises that were broken, a sentence each.
    """
    ledger = self._coordinator.ledger
    seconds = self._seconds(time.perf_counter())
    size = ledger.group_size
    dropped = {name: count * size for name, count in ledger.dropped.items()}
    values: dict[str, float] = {
      **{
        name.replace("/", "_"): value for name, value in self._further().items()
      },
      "seconds": seconds,
      "steps": self._coordinator.newest_version,
      "resumes": self.num_resumes,
      "tokens_per_s": self._trained_tokens / seconds,
      "versions_alive_max": self._coordinator.versions_alive_max,
      "lag_max": max(
        [*ledger.lag_counts, *self._coordinator.reused_lag_counts], default=0
      ),
      "mixed": self.num_mixed,
      "dropped": sum(dropped.values()),
      "generator_idle_share": self._idle_share(time.perf_counter()),
      "trainer_wait_data_s": self._coordinator.trainer_wait_s["data"],
      "trainer_wait_straggler_s": self._coordinator.trainer_wait_s["straggler"],
      **{
        f"generator_wait_{cause}_s": waited_s
        for cause, waited_s in self._coordinator.fleet.wait_s.items()
      },
      **{f"lag_count/{lag}": n for lag, n in ledger.lag_counts.items()},
      **ledger_values(self._coordinator),
      **extra,
    }
    if self._accuracies:
      values["accuracy_before"] = self._accuracies[min(self._accuracies)]
      if self._evaluates_last:
        values["accuracy_after"] = self._accuracies[max(self._accuracies)]
    if self._num_mismatches:
      values["mismatch_kl_k3"] = self._mismatch_sum / self._num_mismatches
    summary.write_summary(self._workdir, values, command=command)
    self._progress.close()
    table = summary.closing_table(
      values, lag_counts=ledger.lag_counts, dropped_by_reason=dropped
    )
    for line in table.splitlines():
      self.note(line)
    # What was generated and judged in full, and teaches nothing, breaks no
    # promise.
    allowed = (
      ledger_lib.ALL_SOLVED,
      ledger_lib.NONE_SOLVED,
      train_step.NO_TOKEN,
      train_step.NONFINITE,
    )
    judged = {
      **values,
      "dropped": values["dropped"] - sum(dropped.get(r, 0) for r in allowed),
    }
    schedule = self._coordinator.schedule
    return summary.broken_promises(
      judged,
      max_staleness=schedule.max_staleness,
      may_mix=schedule.mixes_versions,
      may_drop=schedule.drops_groups,
    )

  def close(self) -> None:
    """Closes every file; what was written stays valid."""
    self._progress.close()
    self._metrics.close()
    self._samples.close()
    self._trace.close()

  def _idle_share(self, now_s: float) -> float:
    """Share of the generator meshes' time in which none had a request."""
    elapsed_s = max(self._generator_s(now_s), 1e-9)
    return max(0.0, 1.0 - self._generator_busy_s() / elapsed_s)

  def _seconds(self, now_s: float) -> float:
    """How long the run has gone on, over all attempts."""
    return self._before_s + now_s - self._start_s

  def _generator_s(self, now_s: float) -> float:
    """The same, times the generator meshes."""
    here_s = (now_s - self._start_s) * len(self._generators)
    return self._generator_before_s + here_s

  def _generator_busy_s(self) -> float:
    busy_s = sum(generator.busy_s for generator in self._generators)
    return self._generator_busy_before_s + busy_s

  def _lane_counts(self) -> dict[str, float]:
    """Decode steps of slots, with a request and in all, and requests spilled.

    Summed over lanes, that of the evaluation included.
    """
    counters = [
      lane.counters
      for generator in self._generators
      for lane in generator.worker.lanes
    ]
    return {
      f"rollout/{name}": float(sum(getattr(each, name) for each in counters))
      for name in ("busy_slot_steps", "total_slot_steps", "spilled")
    }

  def _copies(self) -> dict[str, float]:
    """Versions in host memory, and from where generators got theirs."""
    copied_from = self._store.copied_from
    return {
      "weights/host_bytes": float(self._store.host_bytes),
      **{
        f"weights/copied_from_{kind}": float(copied_from[kind])
        for kind in ("trainer", "peer", "host")
      },
    }


def ledger_values(
  coordinator: coordinator_lib.Coordinator,
) -> dict[str, float]:
  """The ledger as flat numbers: tokens and trajectories by where they are.

  generated_tokens is the sum of open (finished, its group not complete), ready,
  in batch, trained and dropped; in_flight_tokens come on top: they are held by
  live requests, and known as of each generator's last report.
  """
  ledger = coordinator.ledger
  tokens, size = ledger.tokens, ledger.group_size
  num_lags = max(sum(ledger.lag_counts.values()), 1)
  # Generators count from when they joined, the ledger from the very beginning.
  reported = sum(view.num_sampled for view in coordinator.fleet)
  reported += coordinator.generated_before
  values: dict[str, float] = {
    "generated": ledger.num_generated,
    "trained": ledger.num_trained * size,
    "reused": coordinator.reused_lag_counts.total() * size,
    "moved": ledger.num_moved,
    "regenerated": ledger.num_regenerated * size,
    "generated_tokens": tokens.generated,
    "open_tokens": tokens.open,
    "ready_tokens": tokens.ready,
    "in_batch_tokens": tokens.in_batch,
    "trained_tokens": tokens.trained,
    "dropped_tokens": tokens.dropped.total(),
    "in_flight_tokens": max(reported - tokens.generated, 0),
    "reprefilled": tokens.reprefilled,
    "moved_tokens": tokens.moved,
    "lag_mean": sum(ledger.lag_sums.values()) / num_lags,
    "lag_in_flight_mean": ledger.lag_sums["in_flight"] / num_lags,
    "lag_in_queue_mean": ledger.lag_sums["in_queue"] / num_lags,
    # The length-bias audit: a schedule that prefers short answers trains on
    # shorter ones than it samples.
    "length_generated_mean": tokens.generated / max(ledger.num_generated, 1),
    "length_trained_mean": tokens.trained / max(ledger.num_trained * size, 1),
  }
  for reason, count in tokens.dropped.items():
    values[f"dropped_tokens/{reason}"] = count
  for reason, counts in ledger.dropped_lengths.items():
    for bound, count in counts.items():
      values[f"dropped_shorter_than/{reason}/{bound}"] = count
  return {name: float(value) for name, value in values.items()}
