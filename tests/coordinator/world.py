"""A world of random timing around the bare coordinator.

Everything that is under way sits in a list; `step` completes one entry, chosen
from outside. So each stream of events that can reach a coordinator is some
sequence of choices, and an empty list before the end is a deadlock.
"""

import collections
import dataclasses
from typing import Any

from dora_jax.coordinator import balance, coordinator
from dora_jax.coordinator import events as ev
from dora_jax.coordinator import reuse as reuse_lib
from dora_jax.coordinator.schedules import base, registry

# Of the balance settings; a test overrides what it is about.
SETTINGS = {
  "repartition": True,
  "moves": True,
  "filling": True,
  "on_step": True,
  "kv_pressure": 2.0,
  "period_s": 10.0,
  "weight_bytes": 1000,
  "kv_token_bytes": 10,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finish:
  """A request is being decoded, wherever it is by then."""

  group_id: int
  member: int


def length(group_id: int, member: int) -> int:
  """Tokens of a completion: arbitrary, but always the same."""
  return 1 + (7 * group_id + 3 * member) % 23


class World:
  """Carries out commands in whatever order its caller chooses."""

  def __init__(
    self,
    *,
    schedule: str = "dora",
    max_staleness: int,
    prompts_per_batch: int,
    group_size: int,
    num_steps: int,
    slots: list[int],
    lanes_per_mesh: int = 1,
    rollout_groups: int | None = None,
    evict: bool = False,
    settings: dict | None = None,
    num_groups: int | None = None,
    fails=lambda group_id, member: False,
    solves=lambda group_id, member: None,
    max_filtered: int | None = None,
    move_fails=lambda: False,
    reuse=reuse_lib.NOTHING,
  ):
    options = base.Options(
      max_staleness=max_staleness,
      prompts_per_batch=prompts_per_batch,
      rollout_groups=rollout_groups,
      oversample=1.5,
      evict=evict,
    )
    self.make_coordinator = lambda: coordinator.Coordinator(
      schedule=registry.create(schedule, options),
      balance_settings=balance.Settings(**{**SETTINGS, **(settings or {})}),
      group_size=group_size,
      prompts_per_batch=prompts_per_batch,
      num_steps=num_steps,
      max_filtered=max_filtered,
      reuse=reuse,
    )
    self.coordinator: Any = self.make_coordinator()
    made = self.coordinator.schedule
    self.max_staleness = made.max_staleness
    self.may_mix = made.mixes_versions
    self.is_bounded = schedule in ("dora", "partial_rollout")
    self.group_size = group_size
    self.prompts_per_batch = prompts_per_batch
    self.reuse = reuse
    self.reused: list[tuple[int, ...]] = []
    self.kept: set[int] = set()
    self.fails = fails
    self.solves = solves
    self.filters = max_filtered is not None
    self.move_fails = move_fails
    self.slots = dict(enumerate(slots))
    self.serving: dict[int, int | None] = {}
    # (group_id, member) -> generator, and the version that it began with.
    self.running: dict[tuple[int, int], int] = {}
    self.began: dict[tuple[int, int], int] = {}
    self.versions: dict[int, int] = {}
    self.done: set[tuple[int, int]] = set()
    self.freed: set[int] = set()
    # Versions of which no copy is left.
    self.gone: set[int] = set()
    self.dropped: dict[int, str] = {}
    self.batches: list[tuple[int, ...]] = []
    self.pending: list = []
    # Generators whose events are held back.
    self.paused: set[int] = set()
    self.num_moved = 0
    self.now_s = 0.0
    self.stop: str | None = None
    if num_groups is not None:
      self.send(ev.DataExhausted(num_groups=num_groups))
    self._lanes_per_mesh = lanes_per_mesh
    for generator_id in self.slots:
      self.join(generator_id)

  def join(self, generator_id: int) -> None:
    """A generator is ready."""
    self.send(
      ev.GeneratorJoined(
        generator_id=generator_id,
        num_slots=self.slots[generator_id],
        mesh_id=generator_id // self._lanes_per_mesh,
        kv_capacity=10_000,
      )
    )

  def free(self) -> list[int]:
    """Which of the things under way can be done now; all if none else can."""
    free = [
      index
      for index, thing in enumerate(self.pending)
      if not self.paused & self._parties(thing)
    ]
    return free or list(range(len(self.pending)))

  def _parties(self, thing) -> set[int]:
    """Generators that have to do something for it."""
    match thing:
      case Finish():
        return {self.running[thing.group_id, thing.member]}
      case ev.Move():
        return {thing.source_id, thing.target_id}
      case ev.Cancel() | ev.Loaded():
        return {thing.generator_id}
    return set()

  def step(self, choice: int) -> None:
    """Completes one of the things under way."""
    self.complete(self.pending.pop(choice % len(self.pending)))

  def run(self, choices, limit: int = 100_000) -> None:
    """Completes things until the run stops."""
    for _ in range(limit):
      if self.stop is not None:
        return
      assert self.pending, f"deadlock: {self.coordinator.snapshot()}"
      self.step(next(choices))
    raise AssertionError("the run does not end")

  def has_last_copy(self, generator_id: int) -> bool:
    """Whether a version would be gone with this generator."""
    version = self.serving[generator_id]
    others = [g for g in self.serving if g != generator_id]
    return (
      version is not None
      and version < self.coordinator.newest_version
      and version not in self.freed
      and not any(self.serving[g] == version for g in others)
      and not any(
        isinstance(thing, ev.Loaded) and thing.version == version
        for thing in self.pending
      )
    )

  def lose(self, generator_id: int, *, takes_version: bool = False) -> None:
    """A generator dies, with what it runs and maybe with its version."""
    if takes_version and self.has_last_copy(generator_id):
      version = self.serving[generator_id]
      assert version is not None
      self.gone.add(version)
      self.send(ev.VersionLost(version=version))
    self.paused.discard(generator_id)
    gone = {r for r, g in self.running.items() if g == generator_id}
    for request in gone:
      del self.running[request]
    self.serving.pop(generator_id)
    self.pending = [
      thing
      for thing in self.pending
      if not (
        isinstance(thing, Finish) and (thing.group_id, thing.member) in gone
      )
      and getattr(thing, "generator_id", None) != generator_id
    ]
    self.send(ev.GeneratorLost(generator_id=generator_id))

  def skip_step(self) -> None:
    """The step under way, if there is one, comes to nothing."""
    steps = [p for p in self.pending if isinstance(p, ev.StepDone)]
    for done in steps:
      self.pending.remove(done)
      self.dropped |= dict.fromkeys(self.batches.pop(), "nonfinite")
      self.reused.pop()
      self.send(ev.StepSkipped(step=done.version - 1, reason="nonfinite"))

  def complete(self, thing) -> None:
    """What was under way is done, and the coordinator hears of it."""
    match thing:
      case Finish():
        request = thing.group_id, thing.member
        generator_id = self.running.pop(request)
        self.done.add(request)
        self.send(
          ev.Finished(
            generator_id=generator_id,
            group_id=thing.group_id,
            member=thing.member,
            version=self.began[request],
            num_tokens=length(*request),
          )
        )
      case ev.Move():
        self._move(thing)
      case ev.Cancel():
        found = [
          r for r in thing.requests if self.running.get(r) == thing.generator_id
        ]
        for request in found:
          del self.running[request]
        self.pending = [
          p
          for p in self.pending
          if not (isinstance(p, Finish) and (p.group_id, p.member) in found)
        ]
        self.send(
          ev.Cancelled(
            generator_id=thing.generator_id,
            cancelled=tuple((*r, length(*r) // 2) for r in found),
          )
        )
      case ev.Loaded():
        self.serving[thing.generator_id] = thing.version
        self.send(thing)
      case _:
        self.send(thing)

  def _move(self, move: ev.Move) -> None:
    can = {move.source_id, move.target_id} <= self.serving.keys()
    if can and not self.move_fails():
      moved = [
        r for r in move.requests if self.running.get(r) == move.source_id
      ]
    else:
      moved = []
    for request in moved:
      assert self.serving[move.target_id] == move.version
      self.running[request] = move.target_id
    self.num_moved += len(moved)
    if move.target_id in self.serving:
      self._check_slots(move.target_id)
    self.send(
      ev.Moved(
        source_id=move.source_id,
        target_id=move.target_id,
        moved=tuple(moved),
        left=tuple(r for r in move.requests if r not in moved),
        num_kv_tokens=sum(length(*r) for r in moved),
      )
    )

  def send(self, event: ev.Event) -> None:
    """The coordinator hears an event, and its commands are carried out."""
    self.now_s += 1.0
    for command in self.coordinator.handle(event, self.now_s):
      self.carry_out(command)
    self.coordinator.ledger.tokens.check()
    self._check_r2()

  def report(self, generator_id: int, kv_used_share: float) -> None:
    """A generator tells how it fares."""
    kv_tokens = sum(
      length(*r) for r, g in self.running.items() if g == generator_id
    )
    self.send(
      ev.Progress(
        generator_id=generator_id,
        num_sampled=0,
        num_kv_tokens=kv_tokens,
        num_waiting=0,
        pages_used=round(1000 * kv_used_share),
        num_pages=1000,
      )
    )

  def _check_r2(self) -> None:
    """Asserts that the steps left can take all that has started."""
    if not self.is_bounded:
      return
    next_step = len(self.batches)
    trained = {g for batch in self.batches for g in batch}
    untrained = [
      version
      for group_id, version in self.versions.items()
      if group_id not in trained and group_id not in self.dropped
    ]
    for bound in {*untrained}:
      num_older = sum(version <= bound for version in untrained)
      steps_left = bound + self.max_staleness - next_step + 1
      assert num_older <= steps_left * self.prompts_per_batch

  def carry_out(self, command: ev.Command) -> None:
    """Begins what is commanded; checks that it may be."""
    assert self.stop is None, "a command after Stop"
    match command:
      case ev.Load():
        residents = [
          r for r, g in self.running.items() if g == command.generator_id
        ]
        assert not residents or (command.carries_live and self.may_mix)
        assert command.version not in self.freed
        assert command.version not in self.gone
        self.serving[command.generator_id] = None
        self.pending.append(
          ev.Loaded(generator_id=command.generator_id, version=command.version)
        )
      case ev.Submit():
        self._submit(command)
      case ev.Move():
        assert self.serving[command.source_id] == command.version
        assert self.serving[command.target_id] == command.version
        self.pending.append(command)
      case ev.Cancel():
        self.pending.append(command)
      case ev.Restart():
        del self.versions[command.group_id]
        for member in range(self.group_size):
          assert (command.group_id, member) not in self.running
          self.done.discard((command.group_id, member))
      case ev.Score():
        self._score(command)
      case ev.Train():
        self._train(command)
      case ev.Drop():
        assert command.group_id not in self.dropped
        self.dropped[command.group_id] = command.reason
      case ev.Release():
        assert command.version not in self.freed
        assert command.version not in self.serving.values()
        self.freed.add(command.version)
      case ev.Stop():
        self.stop = command.reason

  def _score(self, command: ev.Score) -> None:
    request = {"group_id": command.group_id, "member": command.member}
    if self.fails(command.group_id, command.member):
      self.pending.append(ev.ScoreFailed(**request, reason="reward"))
    else:
      self.pending.append(
        ev.Scored(**request, is_solved=self.solves(**request))
      )

  def _submit(self, command: ev.Submit) -> None:
    # C1: one version for the whole group, that of the generator.
    assert self.serving[command.generator_id] == command.version
    assert command.version not in self.freed
    assert self.may_mix or command.version not in self.gone
    version = self.versions.setdefault(command.group_id, command.version)
    assert self.may_mix or version == command.version
    self._overtake(command)
    for member in command.members:
      request = command.group_id, member
      # Exactly once.
      assert request not in self.running and request not in self.done
      self.running[request] = command.generator_id
      self.began[request] = command.version
      self.pending.append(Finish(group_id=command.group_id, member=member))
    self._check_slots(command.generator_id)

  def _overtake(self, command: ev.Submit) -> None:
    """Lets no earlier Cancel reach what is only now submitted.

    A generator follows its orders one after another, so a Cancel that comes
    before has found nothing: the request has finished, and begins anew.
    """
    anew = {(command.group_id, member) for member in command.members}
    self.pending = [
      dataclasses.replace(
        thing, requests=tuple(r for r in thing.requests if r not in anew)
      )
      if isinstance(thing, ev.Cancel)
      else thing
      for thing in self.pending
    ]

  def _check_slots(self, generator_id: int) -> None:
    num_live = sum(g == generator_id for g in self.running.values())
    assert num_live <= self.slots[generator_id]

  def _train(self, command: ev.Train) -> None:
    assert command.step == len(self.batches)
    trained = {g for batch in self.batches for g in batch}
    for group_id in command.group_ids:
      assert group_id not in trained and group_id not in self.dropped
      # C2: every member was generated. C3: the lag is bounded.
      assert all((group_id, m) in self.done for m in range(self.group_size))
      lag = command.step - self.versions[group_id]
      assert 0 <= lag <= self.max_staleness
    # Only what was kept can be taken again, and what is kept may be.
    assert self.kept >= {*command.reused_ids}
    assert len(command.reused_ids) <= self.reuse.groups_per_step
    for group_id in command.reused_ids:
      assert group_id in trained
      assert 1 <= command.step - self.versions[group_id] <= self.max_staleness
    self.batches.append(command.group_ids)
    self.reused.append(command.reused_ids)
    uses = collections.Counter(
      g for batch in self.batches + self.reused for g in batch
    )
    assert max(uses.values()) <= self.reuse.max_uses
    assert {*command.kept_ids} <= self.kept | {*command.group_ids}
    self.kept = {*command.kept_ids}
    self.pending.append(ev.StepDone(version=command.step + 1))
