"""The virtual cluster: times by hand, promises, faults, one seed one run."""

import pytest

from dora_jax.coordinator import events as ev
from dora_jax.coordinator.schedules import registry
from dora_jax.simulator import pieces, world
from tests.simulator import small


def lengths_of_step(config, step):
  """Lengths of the groups that a synchronous run trains on in this step."""
  work = pieces.make_workload(config)
  size = config.coordinator.group_size
  first = step * config.coordinator.prompts_per_batch
  return [
    length
    for group_id in range(first, first + config.coordinator.prompts_per_batch)
    for length in work.group_lengths(group_id, size, 0)
  ]


def test_a_synchronous_step_is_its_longest_request_and_training():
  config = small.make_config(coordinator__schedule="sync")
  made = small.run(config)
  ends = [0.0] + [step.end_s for step in made.record.steps]
  for step, record in enumerate(made.record.steps):
    lengths = lengths_of_step(config, step)
    # Both generators have a slot for each request: 1 ms a token, then 100 ms.
    expected = 0.001 * max(lengths) + 0.1
    assert record.end_s - ends[step] == pytest.approx(expected)
    assert record.num_tokens == sum(lengths) + 32 * 32
    # Each generator was busy until its own longest request ended.
  busy = made.record.steps[-1].busy_slot_steps
  assert busy == pytest.approx(
    sum(sum(lengths_of_step(config, step)) for step in range(8))
  )


def test_shared_devices_take_turns():
  config = small.make_config(
    coordinator__schedule="sync", cluster__colocated=True
  )
  config.cluster.devices = 2
  made = small.run(config, switch_s=0.02)
  ends = [0.0] + [step.end_s for step in made.record.steps]
  expected = 0.001 * max(lengths_of_step(config, 5)) + 0.1 + 2 * 0.02
  assert ends[6] - ends[5] == pytest.approx(expected)
  trained_s = made.record.steps[-1].seconds["training"]
  assert trained_s == pytest.approx(2 * 8 * (0.1 + 0.04))


@pytest.mark.parametrize("schedule", registry.NAMES)
def test_each_schedule_keeps_what_it_promises(schedule):
  config = small.make_config(
    coordinator__schedule=schedule, generator__chunk_steps=8
  )
  made = small.run(
    config, prefill_token_s=1e-5, load_s=0.002, move_fixed_s=0.002
  )
  steps = made.record.steps
  counts = steps[-1].counts
  lags = {lag for step in steps for lag in step.lags}
  assert len(steps) == 8
  assert max(lags) <= {"dora": 3, "partial_rollout": 3, "one_step_off": 1}.get(
    schedule, 0
  )
  assert all(sum(step.lags.values()) == 32 for step in steps)
  assert (counts["mixed"] > 0) == (schedule == "partial_rollout")
  assert (counts["reprefilled"] > 0) == (schedule == "partial_rollout")
  assert (counts["dropped"] > 0) == (schedule == "replication")
  # Every second of every generator has one state.
  for each in made.generators.values():
    each.settle(made.now_s)
    assert sum(each.seconds.values()) == pytest.approx(made.now_s)


def test_the_record_agrees_with_the_coordinators_own():
  config = small.make_config()
  made = small.run(config, load_s=0.002, move_fixed_s=0.002)
  ledger = made.coordinator.ledger
  assert ledger.num_trained == 8 * 8
  assert ledger.num_moved == made.record.num_moved > 0
  trained = sum(step.num_tokens for step in made.record.steps) - 8 * 32 * 32
  assert ledger.tokens.trained == trained
  lags = sum(
    lag * count
    for step in made.record.steps
    for lag, count in step.lags.items()
  )
  assert sum(ledger.lag_sums.values()) == lags


def test_one_seed_is_one_run_and_another_is_another():
  config = small.make_config()
  first = pieces.simulate(config)
  assert pieces.simulate(config) == first
  config.seed = 1
  assert pieces.simulate(config) != first


def test_full_pages_spill_the_youngest_and_all_finish():
  # All are of one length, so that 16 of them outgrow 600 tokens together.
  alike = {"coordinator__schedule": "sync", "workload__sigma": 0.0}
  config = small.make_config(**alike, generator__kv_tokens=600)
  made = small.run(config, kv_token_spill_s=1e-6)
  counts = made.record.steps[-1].counts
  assert counts["spilled"] > 0
  roomy = small.run(small.make_config(**alike))
  assert roomy.record.steps[-1].counts["spilled"] == 0
  # The same work, in more time.
  assert made.record.steps[-1].busy_slot_steps == pytest.approx(
    roomy.record.steps[-1].busy_slot_steps
  )
  assert made.now_s > roomy.now_s


def test_turns_wait_for_their_environment_without_a_slot():
  plain = small.run(small.make_config(coordinator__schedule="sync"))
  config = small.make_config(
    coordinator__schedule="sync",
    workload__turns=3,
    workload__pause_s=0.05,
    workload__pause_sigma=0.0,
    workload__observation_tokens=10,
  )
  made = small.run(config)
  # Two pauses of 50 ms delay the longest request, and so each step.
  delay_s = made.record.steps[-1].end_s - plain.record.steps[-1].end_s
  assert delay_s == pytest.approx(8 * 0.1, rel=0.02)
  assert made.record.steps[-1].seconds["environment"] > 0
  # What it says is read with all the rest from then on.
  read = small.run(config, kv_token_read_s=1e-6)
  config.workload.observation_tokens = 0
  assert read.now_s > small.run(config, kv_token_read_s=1e-6).now_s


def test_lengths_grow_with_the_version():
  config = small.make_config(
    coordinator__schedule="sync",
    workload__growth=0.1,
    workload__sigma=0.0,
  )
  made = small.run(config)
  tokens = [step.num_tokens - 32 * 32 for step in made.record.steps]
  assert tokens[7] / tokens[0] == pytest.approx(1.1**7, rel=0.02)


def test_rewards_delay_the_end_of_a_batch():
  plain = small.run(small.make_config(coordinator__schedule="sync"))
  late = small.run(
    small.make_config(coordinator__schedule="sync", workload__reward_s=0.03)
  )
  assert late.now_s - plain.now_s == pytest.approx(8 * 0.03)


def faulty(*lines, **changes):
  config = small.make_config(**changes)
  config.faults.events = lines
  return config


def test_a_lost_generator_costs_time_and_nothing_else():
  plain = small.run(small.make_config())
  lost = small.run(faulty("0.5 lose 0", "0.9 join 1"))
  assert lost.now_s > plain.now_s
  assert lost.coordinator.ledger.num_trained == 8 * 8
  assert set(lost.generators) == {0, 1, 2}
  assert lost.generators[2].slots.busy_steps > 0


class Unlucky(world.World):
  """Loses the first generator that requests are on their way to."""

  lost: int | None = None

  def carry(self, move, lives):
    super().carry(move, lives)
    if self.lost is None and lives:
      self.lost = move.target_id
      self.generators[self.lost].lose(self.now_s)
      self.send(ev.GeneratorLost(generator_id=self.lost))


def test_moves_to_a_lost_generator_lose_nobody(monkeypatch):
  monkeypatch.setattr(world, "World", Unlucky)
  made = small.run(
    small.make_config(cluster__devices=4), move_fixed_s=0.05, load_s=0.01
  )
  assert isinstance(made, Unlucky) and made.lost is not None
  assert made.coordinator.ledger.num_trained == 8 * 8


def test_a_slow_generator_makes_a_step_as_slow():
  config = faulty("0 slow 1 3.0", coordinator__schedule="sync")
  made = small.run(config)
  plain = small.run(small.make_config(coordinator__schedule="sync"))
  ratio = (made.now_s - 8 * 0.1) / (plain.now_s - 8 * 0.1)
  assert 1.5 < ratio <= 3.0


def test_rewards_wait_for_the_end_of_an_outage():
  made = small.run(faulty("0.1 outage 4.0", coordinator__schedule="sync"))
  assert made.record.steps[0].start_s == pytest.approx(4.1)


def test_no_generator_left_ends_the_run():
  config = faulty("0.1 lose 0", "0.1 lose 1")
  with pytest.raises(ValueError, match="generators_lost"):
    pieces.simulate(config)


@pytest.mark.parametrize(
  "line", ["lose 3", "5 lose", "5 explode 1", "x lose 1", "5 slow 1"]
)
def test_faults_that_cannot_be_read_are_refused(line):
  with pytest.raises(ValueError, match=r"config\.faults\.events"):
    pieces.simulate(faulty(line))


def test_a_wait_for_nothing_is_reported():
  cost = small.make_costs(message_s=0.001)
  made = pieces.make_world(small.make_config(), cost=cost)
  # A coordinator that hears of no generator waits for ever.
  made.send = lambda event: None
  with pytest.raises(world.Stalled, match="trainer waits for"):
    made.run()
