"""The indexes say what a slow recount says, whatever has changed."""

import collections

import hypothesis
from hypothesis import strategies as st

from dora_jax.coordinator import fleet as fleet_lib


def view_of(generator_id, *, num_slots=4, version=None):
  return fleet_lib.GeneratorView(
    generator_id=generator_id,
    num_slots=num_slots,
    mesh_id=generator_id,
    kv_capacity=100,
    version=version,
  )


def check(fleet):
  """Asserts that every index equals a recount over all generators."""
  free, serving, held = collections.Counter(), collections.Counter(), set()
  loads = collections.defaultdict(list)
  for view in fleet:
    held |= {view.version, view.pledge()} - {None}
    if view.version is not None:
      serving[view.version] += 1
      free[view.version] += view.num_free()
      if view.num_free():
        loads[view.version].append(1 - view.num_free() / view.num_slots)
  for version in range(6):
    assert fleet.num_free(version) == free[version]
    assert fleet.num_serving(version) == serving[version]
    assert fleet.is_served(version) == any(
      view.pledge() == version for view in fleet
    )
    assert fleet.is_orphaned(version) == all(
      view.pledge() != version
      or (view.loading is None and view.leaving_for is not None)
      for view in fleet
    )
    emptiest = fleet.emptiest(version)
    if loads[version]:
      assert emptiest.version == version
      load = 1 - emptiest.num_free() / emptiest.num_slots
      assert load == min(loads[version])
    else:
      assert emptiest is None
  assert fleet.versions_held() == held
  assert fleet.versions_with_room() == sorted(+free, reverse=True)
  assert {v.generator_id for v in fleet.idle()} == {
    v.generator_id for v in fleet if v.is_idle()
  }


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.randoms(use_true_random=False))
def test_the_indexes_equal_a_recount(rng):
  fleet = fleet_lib.Fleet()
  for index in range(60):
    views = list(fleet)
    if len(views) < 2 or rng.random() < 0.1:
      fleet.add(view_of(index, num_slots=rng.randint(1, 4)))
    elif rng.random() < 0.05:
      fleet.remove(rng.choice(views).generator_id, float(index))
    else:
      view = rng.choice(views)
      if view.num_live < view.num_slots and view.version is not None:
        if rng.random() < 0.6:
          view.residents[index, 0] = None
        else:
          view.num_incoming += 1
      elif view.residents:
        view.residents.popitem()
      else:
        view.num_incoming = 0
        view.version = rng.choice([None, *range(6)])
        view.loading = rng.randint(0, 5) if view.version is None else None
        view.leaving_for = rng.choice([None, None, rng.randint(0, 5)])
      fleet.update(view, float(index))
    check(fleet)


def test_equals_take_turns_and_old_entries_do_not_pile_up():
  fleet = fleet_lib.Fleet()
  for generator_id in range(3):
    fleet.add(view_of(generator_id, num_slots=2, version=0))
  turns = []
  for turn in range(3000):
    view = fleet.emptiest(0)
    assert view is not None
    turns.append(view.generator_id)
    # A request comes, another goes: the load stays.
    view.residents[turn, 0] = None
    fleet.update(view, 0.0)
    view.residents.clear()
    fleet.update(view, 0.0)
  assert turns[:6] == [0, 1, 2, 0, 1, 2]
  assert set(collections.Counter(turns).values()) == {1000}
  assert sum(len(heap) for heap in fleet._heaps.values()) < 100


def test_waits_are_counted_by_cause():
  fleet = fleet_lib.Fleet()
  view = view_of(0, version=0)
  fleet.add(view)
  view.loading = 1
  fleet.update(view, 3.0)
  view.loading, view.version = None, 1
  view.residents = {(0, 0): None, (0, 1): None}
  fleet.update(view, 10.0)
  view.num_waiting = 2
  fleet.update(view, 11.0)
  fleet.remove(0, 31.0)
  assert fleet.wait_s == {"prompts": 3.0, "weights": 7.0, "pages": 20.0}
