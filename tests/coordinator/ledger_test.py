import pytest

from dora_jax.coordinator import ledger as ledger_lib


def finished_group(ledger, version):
  group = ledger.start(version)
  members = ledger.submit(group, 7, 9)
  for member in members:
    ledger.finish(
      group.group_id, member, generator_id=7, num_tokens=10 + member
    )
  return group.group_id, members


def test_a_group_goes_once_around():
  ledger = ledger_lib.Ledger(group_size=2)
  group_id, members = finished_group(ledger, version=3)
  assert members == (0, 1)
  assert not ledger.num_generating and ledger.num_unfinished == {3: 1}
  assert ledger.score(group_id, 0, at=4) is None and not ledger.ready
  assert ledger.tokens.open == 21
  settled = ledger.score(group_id, 1, at=4)
  assert settled is not None and settled.group_id == group_id
  assert ledger.ready == [(3, group_id)] and ledger.num_ready == {3: 1}
  assert (ledger.tokens.open, ledger.tokens.ready) == (0, 21)
  ledger.take([group_id], step=5)
  assert ledger.lag_counts == {2: 2} and ledger.num_trained == 0
  # One version passed while it ran, one while it lay ready; of 2 members each.
  assert ledger.lag_sums == {"in_flight": 2, "in_queue": 2}
  with pytest.raises(ValueError, match="Step 6 starts while another"):
    ledger.take([group_id], step=6)
  ledger.commit()
  assert ledger.num_trained == 1 and ledger.num_committed() == 1
  assert ledger.tokens.trained == ledger.tokens.generated == 21
  with pytest.raises(ValueError, match=r"Step 6 wants \[0\], of which only 0"):
    ledger.take([group_id], step=6)
  # Versions come and go for ever: nothing of this one is left.
  for counts in (
    ledger.num_generating,
    ledger.num_unfinished,
    ledger.num_ready,
    ledger.num_untrained,
    ledger._closed,
  ):
    assert not counts


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_failed_reward_drops_its_group_and_gives_the_credit_back(order):
  ledger = ledger_lib.Ledger(group_size=2)
  group_id, _ = finished_group(ledger, version=0)
  settled = [
    ledger.fail(group_id, member, "late", at=0)
    if member == 0
    else ledger.score(group_id, member, at=0)
    for member in order
  ]
  # It is dropped when its last member is settled, not before.
  first, last = settled
  assert first is None and last is not None and last.failures == ["late"]
  assert ledger.dropped == {"late": 1} and ledger.num_dropped() == 1
  assert ledger.num_committed() == 0
  assert not ledger.num_untrained and not ledger.ready
  # 10 and 11 tokens: both in 8 … 15.
  assert ledger.dropped_lengths == {"late": {16: 2}}
  ledger.tokens.check()
  assert ledger.tokens.dropped == {"late": 21}


def test_a_ready_and_an_open_group_can_be_given_up():
  ledger = ledger_lib.Ledger(group_size=2)
  ready, _ = finished_group(ledger, version=0)
  for member in (0, 1):
    ledger.score(ready, member, at=0)
  group = ledger.start(0)
  ledger.submit(group, 7, 1)
  ledger.finish(group.group_id, 0, generator_id=7, num_tokens=5)
  assert ledger.drop(ready, "oversampled") is None
  assert ledger.drop(group.group_id, "oversampled") is group
  ledger.cancelled("oversampled", 3)
  ledger.tokens.check()
  assert ledger.tokens.generated == ledger.tokens.dropped["oversampled"] == 29
  assert not ledger.open and not ledger.ready and not ledger.num_untrained
  assert not ledger.num_generating and not ledger._closed


def test_a_regenerated_group_begins_anew_at_the_newer_version():
  ledger = ledger_lib.Ledger(group_size=2)
  group = ledger.start(1)
  ledger.submit(group, 7, 2)
  ledger.finish(0, 0, generator_id=7, num_tokens=5)
  ledger.score(0, 0, at=1)
  del group.running[1]
  ledger.regenerate(group, version=3, reason="evicted")
  assert group.waiting == [0, 1] and group.version == 3
  assert group.num_scored == 0 and group.lengths == []
  for counts in (
    ledger.num_generating,
    ledger.num_unfinished,
    ledger.num_untrained,
  ):
    assert counts == {3: 1}
  ledger.tokens.check()
  # It is the same group: its credit was never given back.
  assert ledger.num_committed() == 1 and ledger.tokens.dropped["evicted"] == 5


def test_what_is_not_on_the_map_raises():
  ledger = ledger_lib.Ledger(group_size=2)
  group = ledger.start(1)
  ledger.submit(group, 7, 1)
  with pytest.raises(ValueError, match="generator 8, which does not run it"):
    ledger.finish(0, 0, generator_id=8, num_tokens=1)
  assert group.waiting == [1]
  with pytest.raises(ValueError, match="does not wait for a reward"):
    ledger.score(0, 0, at=1)
  with pytest.raises(ValueError, match="Group 9 was scored"):
    ledger.score(9, 0, at=1)
  ledger.tokens.generated += 1
  with pytest.raises(ValueError, match="1 tokens were generated, but 0"):
    ledger.tokens.check()
