"""What a simulated run was like: noted at each step, measured between two."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from dora_jax.simulator import generator

# Why a generator did not decode.
CAUSES = ("prompts", "weights", "pages", "environment", "training")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """A finished step, and the sums since the start of the run at its end.

  Attributes:
    start_s: when the trainer began.
    end_s: when its version was published.
    num_tokens: trained on, prompts included.
    lags: lag in versions -> trajectories trained with it, in this step.
    num_alive: versions alive at its end.
    seconds: state of generators -> seconds, summed over them.
    busy_slot_steps: decode steps of slots with a request.
    slot_steps: decode steps of all slots.
    waited_s: cause -> seconds that the trainer stood idle.
    counts: moved, kv_moved, reprefilled, dropped, mixed and spilled.
  """

  start_s: float
  end_s: float
  num_tokens: int
  lags: Mapping[int, int]
  num_alive: int
  seconds: Mapping[str, float]
  busy_slot_steps: float
  slot_steps: float
  waited_s: Mapping[str, float]
  counts: Mapping[str, float]


class Record:
  """Notes what happens.

  Attributes:
    steps: finished ones, in order.
    num_dropped: trajectories that are never trained.
    num_moved: requests carried to another generator.
    num_kv_moved: positions whose KV they took along.
    num_reprefilled: tokens of live requests whose KV was computed anew.
  """

  def __init__(self) -> None:
    self.steps: list[Step] = []
    self.num_dropped = self.num_moved = self.num_kv_moved = 0
    self.num_reprefilled = 0
    self._start_s, self._num_tokens = 0.0, 0
    self._lags: collections.Counter[int] = collections.Counter()

  def begin_step(self, now_s: float, num_tokens: int) -> None:
    """The trainer begins."""
    self._start_s, self._num_tokens = now_s, num_tokens

  def lag(self, lag: int, num_trajectories: int) -> None:
    """So many of the batch have this lag."""
    self._lags[lag] += num_trajectories

  def end_step(
    self,
    now_s: float,
    generators: Iterable[generator.VirtualGenerator],
    *,
    waited_s: Mapping[str, float],
    num_alive: int,
  ) -> None:
    """The trainer has published; generators are settled."""
    seconds: dict[str, float] = collections.defaultdict(float)
    busy = steps = mixed = spilled = 0.0
    for each in generators:
      for state, spent_s in each.seconds.items():
        seconds[state] += spent_s
      busy += each.slots.busy_steps
      steps += each.slots.steps * each.num_slots
      mixed += each.num_mixed
      spilled += each.line.num_spilled
    self.steps.append(
      Step(
        start_s=self._start_s,
        end_s=now_s,
        num_tokens=self._num_tokens,
        lags=dict(self._lags),
        num_alive=num_alive,
        seconds=seconds,
        busy_slot_steps=busy,
        slot_steps=steps,
        waited_s=dict(waited_s),
        counts={
          "moved": float(self.num_moved),
          "kv_moved": float(self.num_kv_moved),
          "reprefilled": float(self.num_reprefilled),
          "dropped": float(self.num_dropped),
          "mixed": mixed,
          "spilled": spilled,
        },
      )
    )
    self._lags.clear()

  def measure(self, *, num_warmup: int, num_cooldown: int) -> dict[str, float]:
    """What the steps between warm-up and cool-down were like.

    Args:
      num_warmup: steps at the beginning that are left out, at least 1.
      num_cooldown: steps at the end that are left out: a run that nears its end
        starts nothing new, and lives on what it has generated before.

    Raises:
      ValueError: the run has made too few steps.
    """
    measured = self.steps[num_warmup : len(self.steps) - num_cooldown]
    if num_warmup < 1 or not measured:
      raise ValueError(
        f"The run has made {len(self.steps)} steps, but "
        f"config.measure.warmup_steps {num_warmup} (at least 1) and "
        f"config.measure.cooldown_steps {num_cooldown} leave none to measure."
      )
    before, after = self.steps[num_warmup - 1], measured[-1]
    seconds = after.end_s - before.end_s
    lags: collections.Counter[int] = collections.Counter()
    for step in measured:
      lags.update(step.lags)
    spent = {
      state: after.seconds.get(state, 0.0) - before.seconds.get(state, 0.0)
      for state in ("decoding", *CAUSES)
    }
    slot_steps = after.slot_steps - before.slot_steps
    busy = after.busy_slot_steps - before.busy_slot_steps
    num_steps = len(measured)
    train_s = sum(step.end_s - step.start_s for step in measured)
    return {
      "tokens_per_s": sum(step.num_tokens for step in measured) / seconds,
      "step_s": seconds / num_steps,
      "train_s": train_s / num_steps,
      "rollout_not_hidden_s": (seconds - train_s) / num_steps,
      "lag_mean": sum(lag * n for lag, n in lags.items()) / lags.total(),
      "lag_max": max(lags),
      "versions_max": max(step.num_alive for step in measured),
      "bubble_share": 1.0 - busy / max(slot_steps, 1e-9),
      **{
        f"idle/{cause}": spent[cause] / sum(spent.values()) for cause in CAUSES
      },
      **{
        f"wait_{cause}_s": (after.waited_s[cause] - before.waited_s[cause])
        / num_steps
        for cause in after.waited_s
      },
      **{
        name: (after.counts[name] - before.counts[name]) / num_steps
        for name in after.counts
      },
    }
