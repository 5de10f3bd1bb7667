from dora_jax.coordinator import placement


def generators(*rows):
  return [
    placement.GeneratorView(
      generator_id=index,
      num_slots=slots,
      version=version,
      loading=loading,
      num_live=live,
    )
    for index, (slots, version, loading, live) in enumerate(rows)
  ]


def test_members_sit_together_then_where_all_fit_then_spread():
  all_of_them = generators(
    (8, 1, None, 6), (8, 1, None, 3), (8, 1, None, 4), (8, 0, None, 0)
  )
  seat = lambda members, hosts: placement.seats(
    all_of_them, version=1, num_members=members, hosts=hosts
  )
  # All four fit on 1 (5 free) and 2 (4 free); 1 is emptier.
  assert seat(4, []) == [(1, 4)]
  # A generator that hosts the group shares its prompt's pages.
  assert seat(2, [0]) == [(0, 2)]
  assert seat(4, [0]) == [(0, 2), (1, 2)]
  # Nobody has room for 7: the emptiest first.
  assert seat(7, []) == [(1, 5), (2, 2)]
  # Slots are short: 11 are free.
  assert sum(n for _, n in seat(20, [])) == 11


def test_only_idle_generators_take_the_newest_version():
  all_of_them = generators(
    (4, 1, None, 0), (4, 1, None, 2), (4, 2, None, 0), (4, None, 2, 0)
  )
  assert placement.generators_to_load(all_of_them, newest_version=2) == [0]


def test_the_oldest_version_is_never_refilled():
  fill = lambda rows, newest, oldest: [
    g.generator_id
    for g in placement.generators_to_fill(
      generators(*rows), newest_version=newest, oldest_version=oldest
    )
  ]
  rows = [(4, 1, None, 1), (4, 2, None, 1), (4, 3, None, 1)]
  assert fill(rows, 3, 1) == [1, 2]
  # Nobody serves version 4 yet: the emptiest makes way, the others go on.
  rows = [(4, 3, None, 2), (4, 3, None, 1), (4, 3, None, 3)]
  assert fill(rows, 4, 3) == [0, 2]
  # One loads it: version 3 is the oldest of two, and drains.
  rows = [(4, 3, None, 2), (4, None, 4, 0), (4, 3, None, 3)]
  assert fill(rows, 4, 3) == []
