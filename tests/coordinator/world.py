"""A world of random timing around the bare coordinator.

Everything that is under way sits in a list; `step` completes one entry, chosen
from outside. So each stream of events that can reach a coordinator is some
sequence of choices, and an empty list before the end is a deadlock.
"""

from dora_jax.coordinator import coordinator as coordinator_lib
from dora_jax.coordinator import events as ev
from dora_jax.coordinator.schedules import registry


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
    rollout_groups: int | None = None,
    num_groups: int | None = None,
    fails=lambda group_id, member: False,
  ):
    self.max_staleness = max_staleness
    self.group_size = group_size
    self.coordinator = coordinator_lib.Coordinator(
      schedule=registry.create(
        schedule,
        max_staleness=max_staleness,
        prompts_per_batch=prompts_per_batch,
        rollout_groups=rollout_groups,
      ),
      group_size=group_size,
      prompts_per_batch=prompts_per_batch,
      num_steps=num_steps,
    )
    self.fails = fails
    self.slots = dict(enumerate(slots))
    self.serving: dict[int, int | None] = {}
    self.running: dict[int, set[tuple[int, int]]] = {
      g: set() for g in self.slots
    }
    self.versions: dict[int, int] = {}
    self.submitted: set[tuple[int, int]] = set()
    self.freed: set[int] = set()
    self.dropped: dict[int, str] = {}
    self.batches: list[tuple[int, ...]] = []
    self.pending: list[ev.Event] = []
    self.now_s = 0.0
    self.stop: str | None = None
    if num_groups is not None:
      self.send(ev.DataExhausted(num_groups=num_groups))
    for generator_id, num_slots in self.slots.items():
      self.send(
        ev.GeneratorJoined(generator_id=generator_id, num_slots=num_slots)
      )

  def step(self, choice: int) -> None:
    """Completes one of the things under way."""
    self.send(self.pending.pop(choice % len(self.pending)))

  def run(self, choices, limit: int = 100_000) -> None:
    """Completes things until the run stops."""
    for _ in range(limit):
      if self.stop is not None:
        return
      assert self.pending, f"deadlock: {self.coordinator.snapshot()}"
      self.step(next(choices))
    raise AssertionError("the run does not end")

  def send(self, event: ev.Event) -> None:
    if isinstance(event, ev.Finished):
      self.running[event.generator_id].remove((event.group_id, event.member))
    if isinstance(event, ev.Loaded):
      self.serving[event.generator_id] = event.version
    self.now_s += 1.0
    for command in self.coordinator.handle(event, self.now_s):
      self.carry_out(command)

  def carry_out(self, command: ev.Command) -> None:
    assert self.stop is None, "a command after Stop"
    match command:
      case ev.Load():
        assert not self.running[command.generator_id]
        assert command.version not in self.freed
        self.serving[command.generator_id] = None
        self.pending.append(
          ev.Loaded(generator_id=command.generator_id, version=command.version)
        )
      case ev.Submit():
        self._submit(command)
      case ev.Score():
        if self.fails(command.group_id, command.member):
          self.pending.append(
            ev.ScoreFailed(
              group_id=command.group_id, member=command.member, reason="reward"
            )
          )
        else:
          self.pending.append(
            ev.Scored(group_id=command.group_id, member=command.member)
          )
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

  def _submit(self, command: ev.Submit) -> None:
    # C1: one version for the whole group, that of the generator.
    assert self.serving[command.generator_id] == command.version
    assert command.version not in self.freed
    assert (
      self.versions.setdefault(command.group_id, command.version)
      == command.version
    )
    for member in command.members:
      # Exactly once.
      assert (command.group_id, member) not in self.submitted
      self.submitted.add((command.group_id, member))
      self.running[command.generator_id].add((command.group_id, member))
      self.pending.append(
        ev.Finished(
          generator_id=command.generator_id,
          group_id=command.group_id,
          member=member,
          version=command.version,
        )
      )
    assert (
      len(self.running[command.generator_id])
      <= self.slots[command.generator_id]
    )

  def _train(self, command: ev.Train) -> None:
    assert command.step == len(self.batches)
    trained = {g for batch in self.batches for g in batch}
    for group_id in command.group_ids:
      assert group_id not in trained and group_id not in self.dropped
      # C2: every member was generated. C3: the lag is bounded.
      assert all(
        (group_id, m) in self.submitted for m in range(self.group_size)
      )
      lag = command.step - self.versions[group_id]
      assert 0 <= lag <= self.max_staleness
    self.batches.append(command.group_ids)
    self.pending.append(ev.StepDone(version=command.step + 1))
