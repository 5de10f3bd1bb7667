"""The virtual cluster: the coordinator's commands become future events.

One heap of what is to come, ordered by the virtual clock. The world carries
commands out and tells what came of them; it decides nothing: which generator
serves which version, what starts where, what moves and when a step is made is
the real coordinator's business, whom it knows by `handle` alone.
"""

import collections
import heapq
from collections.abc import Callable, Sequence
from typing import Any

from dora_jax.coordinator import coordinator as coordinator_lib
from dora_jax.coordinator import events as ev
from dora_jax.simulator import (
  costs,
  faults,
  generator,
  outcome,
  requests,
  workload,
)

# When, the order of what is due at one time, what to call, with what.
_Due = tuple[float, int, Callable[..., None], tuple[Any, ...]]
# Ticks alone on the clock after which nothing will come of them.
_LONELY_TICKS = 8


class Stalled(RuntimeError):
  """Nothing is under way any more, and the run has not ended."""


class World:
  """Runs a coordinator to its end on a virtual clock.

  Attributes:
    coordinator: that decides.
    now_s: the virtual clock.
    record: what has happened, step by step.
    generators: all that have ever joined, by id.
    num_events: that the coordinator has heard.
  """

  def __init__(
    self,
    *,
    coordinator: coordinator_lib.Coordinator,
    cost: costs.Costs,
    work: workload.Workload,
    group_size: int,
    num_generators: int,
    make_generator: Callable[..., generator.VirtualGenerator],
    tick_s: float,
    is_colocated: bool,
    befalls: Sequence[faults.Fault],
  ):
    """Wires; nothing happens yet.

    Args:
      coordinator: decides.
      cost: of everything.
      work: what is generated.
      group_size: M.
      num_generators: at the beginning, each alone on its mesh.
      make_generator: makes one, given its id, what is around it, and now.
      tick_s: seconds between two Ticks; 0 sends none.
      is_colocated: whether generators stand still while the trainer works.
      befalls: what happens to the cluster.
    """
    self.now_s = 0.0
    self.generators: dict[int, generator.VirtualGenerator] = {}
    self.num_events = 0
    self.coordinator = coordinator
    self._cost = cost
    self._work = work
    self._group_size = group_size
    self._num_generators = num_generators
    self._make_generator = make_generator
    self._tick_s = tick_s
    self._is_colocated = is_colocated
    self._befalls = befalls
    self._due: list[_Due] = []
    self._inbox: collections.deque[ev.Event] = collections.deque()
    self._order = 0
    self._has_tick = bool(tick_s)
    self._num_faults = len(befalls)
    self._num_lonely_ticks = 0
    self._groups: dict[int, _Group] = {}
    self._outage_end_s = 0.0
    self._stop_reason: str | None = None
    self.record = outcome.Record()

  def run(self) -> str:
    """Runs to the end; returns why it ended.

    Raises:
      Stalled: the coordinator waits for something that will never come.
    """
    for fault in self._befalls:
      self.at(fault.time_s, self._befall, fault)
    self._join(self._num_generators)
    if self._tick_s:
      self.at(self._tick_s, self._tick)
    self._deliver()
    while self._stop_reason is None:
      self._check_stalled()
      self.now_s, _, call, args = heapq.heappop(self._due)
      call(*args, self.now_s)
      self._deliver()
    return self._stop_reason

  def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
    """Calls back at a time, with the arguments and the time."""
    self._order += 1
    heapq.heappush(self._due, (time_s, self._order, call, args))

  def send(self, event: ev.Event) -> None:
    """Tells the coordinator, after the time that a message takes."""
    if self._cost.message_s:
      self.at(self.now_s + self._cost.message_s, self._arrive, event)
    else:
      self._inbox.append(event)

  def carry(self, move: ev.Move, lives: Sequence[requests.Live]) -> None:
    """Takes requests to another generator of their version."""
    seconds = self._cost.move_s(sum(live.context for live in lives))
    self.at(self.now_s + seconds, self._end_move, move, lives)

  def _arrive(self, event: ev.Event, now_s: float) -> None:
    self._inbox.append(event)

  def _deliver(self) -> None:
    """Lets the coordinator hear what has come in, and does what it says."""
    while self._inbox and self._stop_reason is None:
      event = self._inbox.popleft()
      self.num_events += 1
      if isinstance(event, ev.Loaded):
        self.record.num_reprefilled += event.num_reprefilled
      for command in self.coordinator.handle(event, self.now_s):
        self._carry_out(command)

  def _carry_out(self, command: ev.Command) -> None:
    match command:
      case ev.Submit():
        self._submit(command)
      case ev.Score():
        self._score(command)
      case ev.Load():
        self.generators[command.generator_id].load(command, self.now_s)
      case ev.Move():
        self.generators[command.source_id].extract(command, self.now_s)
      case ev.Cancel():
        self.generators[command.generator_id].cancel(command, self.now_s)
      case ev.Train():
        self._train(command)
      case ev.Restart():
        self._groups.pop(command.group_id)
      case ev.Drop():
        self.record.num_dropped += self._group_size
        # It has no entry where none of its members ever got a slot.
        self._groups.pop(command.group_id, None)
      case ev.Stop():
        self._stop_reason = command.reason

  def _submit(self, command: ev.Submit) -> None:
    group = self._groups.get(command.group_id)
    if group is None:
      lengths = self._work.group_lengths(
        command.group_id, self._group_size, command.version
      )
      group = _Group(command.version, lengths)
      self._groups[command.group_id] = group
    lives = [
      self._request(command, member, group.lengths[member])
      for member in command.members
    ]
    self.generators[command.generator_id].submit(lives, self.now_s)

  def _request(
    self, command: ev.Submit, member: int, length: int
  ) -> requests.Live:
    num_turns = self._work.turns.num_turns
    return requests.Live(
      name=(command.group_id, member),
      version=command.version,
      length=length,
      turn_ends=[length * turn // num_turns for turn in range(1, num_turns)],
      pauses_s=self._work.pauses_s(command.group_id, member),
      context=self._work.prompt_tokens,
      unfilled=self._work.prompt_tokens,
    )

  def _score(self, command: ev.Score) -> None:
    scored = ev.Scored(group_id=command.group_id, member=command.member)
    delay_s = self._work.reward_delay_s(command.group_id, command.member)
    time_s = max(self.now_s + delay_s, self._outage_end_s)
    if time_s > self.now_s:
      self.at(time_s + self._cost.message_s, self._arrive, scored)
    else:
      self.send(scored)

  def _train(self, command: ev.Train) -> None:
    """Makes a step; where devices are shared, the generators stand still."""
    groups = [self._groups.pop(group_id) for group_id in command.group_ids]
    num_tokens = sum(
      sum(group.lengths) + self._group_size * self._work.prompt_tokens
      for group in groups
    )
    for group in groups:
      self.record.lag(command.step - group.version, self._group_size)
    seconds = self._cost.train_s(num_tokens)
    if self._is_colocated:
      seconds += 2 * self._cost.switch_s
      for each in self.generators.values():
        each.hold(self.now_s)
    self.record.begin_step(self.now_s, num_tokens)
    self.at(self.now_s + seconds, self._trained, command.step + 1)

  def _trained(self, version: int, now_s: float) -> None:
    for each in self.generators.values():
      if self._is_colocated:
        each.release(now_s)
      each.settle(now_s)
    self.record.end_step(
      now_s,
      self.generators.values(),
      waited_s=self.coordinator.trainer_wait_s,
      num_alive=len(self.coordinator.versions_alive()),
    )
    self.send(ev.StepDone(version=version))

  def _end_move(
    self, move: ev.Move, lives: Sequence[requests.Live], now_s: float
  ) -> None:
    """Hands requests over, or back where their target cannot take them."""
    source, target = (
      self.generators[move.source_id],
      self.generators[move.target_id],
    )
    moved: tuple[requests.Name, ...] = ()
    if target.serves(move.version):
      moved = tuple(live.name for live in lives)
      target.submit(lives, now_s)
      self.record.num_moved += len(moved)
      self.record.num_kv_moved += sum(live.context for live in lives)
    elif not source.is_lost():
      source.submit(lives, now_s)
    self.send(
      ev.Moved(
        source_id=move.source_id,
        target_id=move.target_id,
        moved=moved,
        left=tuple(name for name in move.requests if name not in moved),
        num_kv_tokens=sum(live.context for live in lives) if moved else 0,
      )
    )

  def _join(self, number: int) -> None:
    for _ in range(number):
      generator_id = len(self.generators)
      made = self._make_generator(
        generator_id=generator_id, around=self, now_s=self.now_s
      )
      self.generators[generator_id] = made
      self._inbox.append(made.joined())

  def _befall(self, fault: faults.Fault, now_s: float) -> None:
    self._num_faults -= 1
    match fault.kind:
      case "join":
        self._join(int(fault.amount))
      case "outage":
        self._outage_end_s = now_s + fault.amount
      case "slow":
        self._existing(fault).slow_down(fault.amount, now_s)
      case "lose":
        self._existing(fault).lose(now_s)
        self.send(ev.GeneratorLost(generator_id=fault.generator_id))

  def _existing(self, fault: faults.Fault) -> generator.VirtualGenerator:
    found = self.generators.get(fault.generator_id)
    if found is None or found.is_lost():
      raise ValueError(
        f"config.faults.events speaks of generator {fault.generator_id} at "
        f"{fault.time_s} s, but there is none by then."
      )
    return found

  def _tick(self, now_s: float) -> None:
    self.at(now_s + self._tick_s, self._tick)
    self._inbox.append(ev.Tick())  # The coordinator's own clock.

  def _check_stalled(self) -> None:
    """Raises where only the clock goes on, and no fault is to come."""
    if len(self._due) > self._has_tick + self._num_faults:
      self._num_lonely_ticks = 0
      return
    self._num_lonely_ticks += 1
    is_waiting = self._num_faults or (
      self._has_tick and self._num_lonely_ticks < _LONELY_TICKS
    )
    if not is_waiting:
      waits = self.coordinator.waits()
      raise Stalled(
        f"Nothing is under way at {self.now_s:.0f} s, and the run has not "
        "ended: "
        + "; ".join(f"{who} waits for {what}" for who, what in waits[:5])
      )


class _Group:
  """A started group: the version that began it, its members' lengths."""

  def __init__(self, version: int, lengths: list[int]):
    self.version = version
    self.lengths = lengths
