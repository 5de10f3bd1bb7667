"""Who sits where, what moves, and what does not."""

import pytest

from dora_jax.coordinator import events as ev
from tests.coordinator import fleet_test, scene


def seats(made, group, version=1):
  return [
    (s.generator_id, s.members)
    for s in made._placement.seat(group, version=version, now_s=0.0)
  ]


def test_members_sit_with_their_group_then_on_the_emptiest():
  made = scene.coordinator_of(
    [
      (1, {0: [0, 1]}),
      (1, {1: [0, 1, 2, 3]}),
      (1, {2: [0], 3: [0]}),
      (0, {}),
    ],
    newest_version=1,
    num_slots=4,
    group_size=4,
  )
  # Group 2 runs a member on generator 2, which shares its prompt's pages: two
  # more fit there. The last goes to generator 0, the other with free slots.
  assert seats(made, made.ledger.open[2]) == [(2, (1, 2)), (0, (3,))]
  # One slot is left of version 1; the rest waits, and says so.
  assert seats(made, made.ledger.open[0]) == [(0, (2,))]
  assert made.ledger.open[0].waiting == [3]
  assert list(made._placement.waiting[1]) == [0]
  fleet_test.check(made.fleet)


def leave(made, generator_id):
  """Orders a generator's residents away, as the balancer does."""
  view = made.fleet[generator_id]
  view.leaving_for = 9
  made.fleet.update(view, 0.0)
  return made._placement.move_away(view, 0.0)


def test_those_that_must_go_go_together_and_those_without_a_slot_stay():
  made = scene.coordinator_of(
    [
      (1, {0: [0, 1], 1: [0, 1]}),
      (1, {1: [2], 2: [0]}),
      (1, {2: [1, 2], 3: [0]}),
      (2, {}),
    ],
    newest_version=2,
    num_slots=4,
    group_size=4,
  )
  moves = leave(made, 0)
  # Group 0 comes first and goes whole to the emptiest. That had been the place
  # for group 1, one of whose members finds a slot elsewhere, the other none.
  assert [(m.target_id, m.requests) for m in moves] == [
    (1, ((0, 0), (0, 1))),
    (2, ((1, 0),)),
  ]
  assert made.ledger.num_moved == 0
  assert made._placement.in_transit == {(0, 0): 1, (0, 1): 1, (1, 0): 2}
  # Their slots are taken from now on: nobody else gets them.
  assert made.fleet.num_free(1) == 0 and made.fleet[0].num_outgoing == 3
  # Asked again, nothing moves twice, and (1, 1) still has no slot until one is.
  assert made._placement.move_away(made.fleet[0], 0.0) == []
  view = made.fleet[1]
  view.residents.pop((2, 0))
  made.fleet.update(view, 0.0)
  (move,) = made._placement.move_away(made.fleet[0], 0.0)
  assert (move.target_id, move.requests) == (1, ((1, 1),))
  fleet_test.check(made.fleet)


@pytest.mark.parametrize("gone", [None, "source", "target", "both"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_move_ends_with_every_request_in_one_place(gone, fails):
  made = scene.coordinator_of(
    [(1, {0: [0, 1]}), (1, {1: [0]}), (1, {})],
    newest_version=1,
    group_size=2,
    num_slots=4,
  )
  (move,) = leave(made, 0)
  assert move.target_id == 2
  submits = []
  lost = {"source": [0], "target": [2], "both": [0, 2]}.get(gone or "", [])
  for generator_id in lost:
    submits += scene.of_class(
      made.handle(ev.GeneratorLost(generator_id=generator_id), 1.0), ev.Submit
    )
  left = move.requests if fails else ()
  submits += scene.of_class(
    made.handle(scene.moved(move, left=left), 2.0), ev.Submit
  )
  host = 0 if fails else 2
  again = {(0, m) for s in submits if s.group_id == 0 for m in s.members}
  group = made.ledger.open[0]
  assert not group.waiting
  if host in lost:
    # Whoever had them is gone: they begin anew, once, elsewhere.
    assert again == {(0, 0), (0, 1)}
    assert not set(group.running.values()) & set(lost)
  else:
    assert not again and group.running == {0: host, 1: host}
    assert list(made.fleet[host].residents) == [(0, 0), (0, 1)]
  for view in made.fleet:
    assert view.num_incoming == view.num_outgoing == 0
    for group_id, member in view.residents:
      running = made.ledger.open[group_id].running
      assert running[member] == view.generator_id
  assert not made._placement.in_transit
  fleet_test.check(made.fleet)
