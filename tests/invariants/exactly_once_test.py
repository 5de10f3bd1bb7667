"""Each trajectory is generated, scored and trained once, whatever befalls.

A state machine of hypothesis: its rules are all that can happen to a run, in
any order, and hypothesis looks for the shortest order that breaks something.
The world asserts at each command; here the indexes are recounted as well.
"""

import random

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from dora_jax.coordinator import events as ev
from dora_jax.coordinator import reuse
from tests.coordinator import driving, fleet_test
from tests.coordinator import world as world_lib
from tests.invariants import no_deadlock_test


class Run(stateful.RuleBasedStateMachine):
  """A run of `dora` with several versions alive and scattered stragglers."""

  @stateful.initialize(
    num_generators=st.integers(2, 6),
    num_slots=st.integers(1, 3),
    lanes_per_mesh=st.integers(1, 2),
    group_size=st.integers(1, 2),
    max_staleness=st.integers(0, 3),
    evict=st.booleans(),
    fails=st.booleans(),
    num_reused=st.integers(0, 3),
  )
  def begin(
    self,
    num_generators,
    num_slots,
    lanes_per_mesh,
    group_size,
    max_staleness,
    evict,
    fails,
    num_reused,
  ):
    total = num_generators * num_slots // group_size
    self.move_fails = False
    self.world = world_lib.World(
      max_staleness=max_staleness,
      prompts_per_batch=max(1, total // 2),
      group_size=group_size,
      num_steps=6,
      slots=[num_slots] * num_generators,
      lanes_per_mesh=lanes_per_mesh,
      rollout_groups=max(1, total),
      evict=evict,
      fails=lambda group_id, member: fails and group_id % 5 == 0,
      move_fails=lambda: self.move_fails,
      reuse=reuse.Settings(groups_per_step=num_reused, max_uses=3),
    )

  @property
  def goes_on(self) -> bool:
    return self.world.stop is None

  @stateful.rule(
    count=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    pace=st.sampled_from(driving.PACES),
  )
  def complete(self, count, seed, pace):
    rng = random.Random(seed)
    for _ in range(count):
      if self.goes_on:
        assert self.world.pending, "deadlock"
        self.world.step(driving.choose(self.world, rng, pace))

  @stateful.rule(choice=st.integers(0, 100))
  def complete_one(self, choice):
    if self.goes_on:
      self.world.step(choice)

  @stateful.rule(fails=st.booleans())
  def moves_fail_from_now_on(self, fails):
    self.move_fails = fails

  @stateful.rule(choice=st.integers(0, 9))
  def lose(self, choice):
    serving = sorted(self.world.serving)
    if self.goes_on and len(serving) > 1:
      self.world.lose(serving[choice % len(serving)])

  @stateful.rule(num_slots=st.integers(1, 4))
  def join(self, num_slots):
    if self.goes_on:
      generator_id = len(self.world.slots)
      self.world.slots[generator_id] = num_slots
      self.world.join(generator_id)

  @stateful.rule(choice=st.integers(0, 9))
  def pause(self, choice):
    serving = sorted(self.world.serving)
    if serving:
      self.world.paused = {serving[choice % len(serving)]}

  @stateful.rule()
  def skip_step(self):
    if self.goes_on:
      self.world.skip_step()

  @stateful.rule()
  def resume(self):
    self.world.paused.clear()

  @stateful.rule()
  def tick(self):
    if self.goes_on:
      self.world.now_s += 10.0
      self.world.send(ev.Tick())

  @stateful.rule(num_more=st.integers(0, 5))
  def end_the_data(self, num_more):
    if self.goes_on and self.world.coordinator._num_groups is None:
      num_groups = self.world.coordinator.ledger.next_group_id + num_more
      self.world.send(ev.DataExhausted(num_groups=num_groups))

  @stateful.invariant()
  def indexes_equal_a_recount(self):
    if not hasattr(self, "world"):
      return
    made = self.world.coordinator
    fleet_test.check(made.fleet)
    running = {
      (group.group_id, member): generator_id
      for group in made.ledger.open.values()
      for member, generator_id in group.running.items()
    }
    for request, generator_id in running.items():
      if generator_id in made.fleet:
        assert request in made.fleet[generator_id].residents
    # Until its Moved is heard, the one who had a request still counts for it.
    for request, generator_id in self.world.running.items():
      assert running[request] == generator_id

  def teardown(self):
    if hasattr(self, "world"):
      driving.drive(self.world, random.Random(0))
      no_deadlock_test.check_the_end(self.world)


TestRun = Run.TestCase
TestRun.settings = hypothesis.settings(
  max_examples=30, stateful_step_count=30, deadline=None
)
