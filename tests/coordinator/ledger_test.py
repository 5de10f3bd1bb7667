import pytest

from dora_jax.coordinator import ledger as ledger_lib


def finished_group(ledger, version):
  group = ledger.start(version)
  members = ledger.submit(group.group_id, 7, 9)
  for member in members:
    ledger.finish(group.group_id, member, version=version, generator_id=7)
  return group.group_id, members


def test_a_group_goes_once_around():
  ledger = ledger_lib.Ledger(group_size=2)
  group_id, members = finished_group(ledger, version=3)
  assert members == (0, 1)
  assert ledger.score(group_id, 0) is None and not ledger.ready
  assert ledger.score(group_id, 1) is None and ledger.ready == [(3, group_id)]
  ledger.take([group_id], step=5)
  assert ledger.lag_counts == {2: 2} and ledger.num_trained == 0
  ledger.commit()
  assert ledger.num_trained == 1 and ledger.num_committed() == 1
  with pytest.raises(
    ValueError, match="Group 0 is to be trained, but it is not"
  ):
    ledger.take([group_id], step=6)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_failed_reward_drops_its_group_and_gives_the_credit_back(order):
  ledger = ledger_lib.Ledger(group_size=2)
  group_id, _ = finished_group(ledger, version=0)
  results = [
    ledger.fail(group_id, member, "late")
    if member == 0
    else ledger.score(group_id, member)
    for member in order
  ]
  # It is dropped when its last member is settled, not before.
  assert results == [None, "late"]
  assert ledger.dropped == {"late": [group_id]}
  assert ledger.num_committed() == 0
  assert not +ledger.num_untrained and not ledger.ready


def test_what_is_not_on_the_map_raises():
  ledger = ledger_lib.Ledger(group_size=2)
  group = ledger.start(1)
  ledger.submit(0, 7, 1)
  with pytest.raises(ValueError, match=r"belongs to version 1.*with version 2"):
    ledger.finish(0, 0, version=2, generator_id=7)
  with pytest.raises(ValueError, match="generator 8, which does not run it"):
    ledger.finish(0, 0, version=1, generator_id=8)
  assert group.waiting == [1]
  with pytest.raises(ValueError, match="does not wait for a reward"):
    ledger.score(0, 0)
  with pytest.raises(ValueError, match="Group 9 was scored"):
    ledger.score(9, 0)
