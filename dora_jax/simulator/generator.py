"""A virtual generator: what a real one would tell, and when.

It wakes at ends of chunks only, and only at those at which something changes:
a request stops, one waits for a slot, the pages are full, or an order came. In
between, `costs` says how far it is.
"""

import collections
import math
import typing
from collections.abc import Callable, Sequence

from dora_jax.coordinator import events as ev
from dora_jax.simulator import admission, costs, requests, slots


@typing.runtime_checkable
class Surroundings(typing.Protocol):
  """What a generator needs of the world around it."""

  def at(
    self, time_s: float, call: Callable[..., None], *args: typing.Any
  ) -> None:
    """Calls back at a time, with the arguments and the time."""
    ...

  def send(self, event: ev.Event) -> None:
    """Tells the coordinator."""
    ...

  def carry(self, move: ev.Move, lives: Sequence[requests.Live]) -> None:
    """Takes what a generator has packed for another."""
    ...


class VirtualGenerator:
  """Serves one version at a time.

  Attributes:
    generator_id: its id.
    num_slots: requests that it runs at once.
    num_mixed: finished requests that several versions have sampled.
    slots: of its live requests.
    line: of those without a slot.
    seconds: "decoding", or why it was idle -> how long; up to `settle`.
  """

  def __init__(
    self,
    *,
    generator_id: int,
    cost: costs.Costs,
    num_slots: int,
    kv_capacity: int,
    chunk_steps: int,
    observation_tokens: int,
    progress_s: float,
    around: Surroundings,
    now_s: float,
  ):
    """Has no version yet.

    Args:
      generator_id: its id.
      cost: of what it does.
      num_slots: requests that it runs at once.
      kv_capacity: tokens whose KV it holds.
      chunk_steps: decode steps between two looks of the host.
      observation_tokens: that an environment appends after a turn.
      progress_s: after so long without a report one is due; one also comes
        with requests that finish.
      around: where its reports go.
      now_s: when it joins.
    """
    self.generator_id = generator_id
    self.num_slots = num_slots
    self.num_mixed = 0
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self.slots = slots.Slots(chunk_steps)
    self.line = admission.Line(
      into=self.slots,
      cost=cost,
      num_slots=num_slots,
      kv_capacity=kv_capacity,
      chunk_steps=chunk_steps,
    )
    self._cost = cost
    self._kv_capacity = kv_capacity
    self._observation_tokens = observation_tokens
    self._progress_s = progress_s
    self._around = around
    self._away: dict[requests.Name, requests.Live] = {}
    self._orders: list[Callable[[float], None]] = []
    self._version: int | None = None
    self._is_loading = self._is_held = self._is_lost = False
    self._slowness = 1.0
    self._since_s = now_s  # when decoding goes on, or went on
    self._wake_s, self._wake_steps, self._wake_id = math.inf, 0.0, 0
    self._said_s = now_s
    self._state, self._state_since_s = "prompts", now_s

  def joined(self) -> ev.GeneratorJoined:
    """What the coordinator hears of it first; it is alone on its mesh."""
    return ev.GeneratorJoined(
      generator_id=self.generator_id,
      num_slots=self.num_slots,
      mesh_id=self.generator_id,
      kv_capacity=self._kv_capacity,
    )

  def serves(self, version: int) -> bool:
    """Whether it is there and serves this version."""
    return not self._is_lost and self._version == version

  def is_lost(self) -> bool:
    """Whether it is gone."""
    return self._is_lost

  # Orders. What concerns live requests is done at the end of a chunk.

  def submit(self, lives: Sequence[requests.Live], now_s: float) -> None:
    """Accepts requests, new or from elsewhere."""
    self.line.extend(lives)
    self._look(now_s)

  def load(self, order: ev.Load, now_s: float) -> None:
    """Serves another version, at once or under what is live."""
    self._is_loading = True
    if order.carries_live:
      self._order(lambda at_s: self._refresh(order, at_s), now_s)
    else:
      self._version = None
      self._around.at(now_s + self._cost.load_s, self._loaded, order.version, 0)
    self.settle(now_s)

  def extract(self, order: ev.Move, now_s: float) -> None:
    """Packs requests for another generator."""
    self._order(lambda _: self._around.carry(order, self._take(order)), now_s)

  def cancel(self, order: ev.Cancel, now_s: float) -> None:
    """Forgets requests."""
    self._order(lambda _: self._cancel(order), now_s)

  def hold(self, now_s: float) -> None:
    """Stands still: its devices train."""
    self._stop_clock(now_s)
    self._is_held = True
    self.settle(now_s)

  def release(self, now_s: float) -> None:
    """Goes on."""
    self._is_held = False
    self._since_s = max(self._since_s, now_s)
    self._look(now_s)
    self.settle(now_s)

  def slow_down(self, factor: float, now_s: float) -> None:
    """Takes `factor` times as long from now on as the costs say."""
    self._stop_clock(now_s)
    self._slowness = factor
    self._look(now_s)

  def lose(self, now_s: float) -> None:
    """Is gone, with all that it had."""
    self._stop_clock(now_s)
    self.settle(now_s)
    self._is_lost = True

  def settle(self, now_s: float) -> None:
    """Brings `seconds` up to date."""
    if not self._is_lost:
      self.seconds[self._state] += now_s - self._state_since_s
      self._state, self._state_since_s = self._state_now(), now_s

  def _state_now(self) -> str:
    if self._is_held:
      return "training"
    if len(self.slots):
      return "decoding"
    if self._is_loading:
      return "weights"
    if len(self.line):
      return "pages"
    return "environment" if self._away else "prompts"

  def _order(self, call: Callable[[float], None], now_s: float) -> None:
    self._orders.append(call)
    self._look(now_s)

  def _take(self, order: ev.Move | ev.Cancel) -> list[requests.Live]:
    """Takes out those that are here, but for ones with an environment."""
    waiting = {live.name: live for live in self.line}
    taken = []
    for name in order.requests:
      if name in self.slots:
        live = self.slots.leave(name)
        self.line.left(live)
        taken.append(live)
      elif name in waiting:
        self.line.remove(waiting[name])
        taken.append(waiting[name])
    return taken

  def _cancel(self, order: ev.Cancel) -> None:
    lives = self._take(order)
    lives += [self._away.pop(n) for n in order.requests if n in self._away]
    self._around.send(
      ev.Cancelled(
        generator_id=self.generator_id,
        cancelled=tuple((*live.name, live.sampled) for live in lives),
      )
    )

  def _refresh(self, order: ev.Load, now_s: float) -> None:
    """Takes a new version under the live requests: all KV is computed anew."""
    num_tokens = round(self.slots.context)
    for live in self.slots:
      if live.sampled or self.slots.clock > live.entered:
        live.is_mixed = True
    for live in (*self.line, *self._away.values()):
      if live.sampled:
        live.is_mixed = True
      num_tokens += live.spilled
      live.unfilled, live.spilled = live.unfilled + live.spilled, 0
    prefill_s = num_tokens * self._cost.prefill_token_s
    self._since_s = now_s + self._slowness * (self._cost.load_s + prefill_s)
    self._around.at(self._since_s, self._loaded, order.version, num_tokens)

  def _loaded(self, version: int, num_reprefilled: int, now_s: float) -> None:
    if self._is_lost:
      return
    self._version, self._is_loading = version, False
    self.settle(now_s)
    self._around.send(
      ev.Loaded(
        generator_id=self.generator_id,
        version=version,
        num_reprefilled=num_reprefilled,
      )
    )

  # Time.

  def _stop_clock(self, now_s: float) -> None:
    """Advances to now, which may be amid a decode step; plans nothing."""
    self._wake_id += 1
    self._wake_s = math.inf
    elapsed_s = now_s - self._since_s
    if self._is_held or elapsed_s <= 0:
      return
    if len(self.slots):
      self.slots.advance(
        self.slots.steps_within(self._cost, elapsed_s / self._slowness)
      )
    self._since_s = now_s

  def _look(self, now_s: float) -> None:
    """Wakes at the end of the chunk that is under way."""
    if self._is_held or self._is_lost:
      return
    num_steps, end_s = 0.0, max(now_s, self._since_s)
    if len(self.slots):
      elapsed_s = (end_s - self._since_s) / self._slowness
      done = self.slots.steps_within(self._cost, elapsed_s)
      num_steps = self.slots.to_boundary(done)
      end_s = self._since_s + self._steps_s(num_steps)
    if end_s < self._wake_s:
      self._wake_at(max(now_s, end_s), num_steps)

  def _steps_s(self, num_steps: float) -> float:
    return self._slowness * self.slots.seconds(self._cost, num_steps)

  def _wake_at(self, time_s: float, num_steps: float) -> None:
    self._wake_id += 1
    self._wake_s, self._wake_steps = time_s, num_steps
    self._around.at(time_s, self._wake, self._wake_id)

  def _wake(self, wake_id: int, now_s: float) -> None:
    """The end of a chunk at which something changes."""
    if wake_id != self._wake_id:
      return
    self._wake_s = math.inf
    self.slots.advance(self._wake_steps)
    self._since_s = max(self._since_s, now_s)
    stopped = self.slots.pop_stopped()
    for live in stopped:
      self.line.left(live)
      self._stop(live, now_s)
    orders, self._orders = self._orders, []
    for order in orders:
      order(now_s)
    self._since_s += self._slowness * self._fill()
    if len(self.slots):
      num_steps = min(self.slots.to_next_stop(), self.line.steps_to_full())
      self._wake_at(self._since_s + self._steps_s(num_steps), num_steps)
    if stopped or now_s - self._said_s >= self._progress_s:
      self._report(now_s)
    self.settle(now_s)

  def _fill(self) -> float:
    """Makes room, lets requests in; seconds that it takes."""
    spill_s = self.line.spill()
    # What was spilled this very moment would come back at once.
    return spill_s if spill_s else self.line.admit()

  def _stop(self, live: requests.Live, now_s: float) -> None:
    """A request has sampled its last token, or ended a turn."""
    if live.turn_ends:
      live.turn_ends.pop(0)
      live.spilled, live.unfilled = live.context, self._observation_tokens
      live.context += self._observation_tokens
      self._away[live.name] = live
      self._around.at(now_s + live.pauses_s.pop(0), self._come_back, live)
      return
    self.num_mixed += live.is_mixed
    group_id, member = live.name
    self._around.send(
      ev.Finished(
        generator_id=self.generator_id,
        group_id=group_id,
        member=member,
        version=live.version,
        num_tokens=live.length,
      )
    )

  def _come_back(self, live: requests.Live, now_s: float) -> None:
    if self._away.pop(live.name, None) is not None:
      self.line.extend([live])
      self._look(now_s)

  def _report(self, now_s: float) -> None:
    self._said_s = now_s
    self._around.send(
      ev.Progress(
        generator_id=self.generator_id,
        num_sampled=round(self.slots.busy_steps),
        num_kv_tokens=round(self.slots.context),
        num_waiting=len(self.line),
        pages_used=min(round(self.slots.context), self._kv_capacity),
        num_pages=self._kv_capacity,
      )
    )
