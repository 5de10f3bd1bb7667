"""The token clock of a generator: who stops when, at ends of chunks."""

from dora_jax.simulator import requests, slots


def live(member, length, **changes):
  values = {"version": 0, "context": 10, "unfilled": 0}
  return requests.Live(
    name=(0, member),
    length=length,
    turn_ends=[],
    pauses_s=[],
    **{**values, **changes},
  )


def test_requests_stop_at_the_end_of_their_chunk_and_the_last_at_once():
  made = slots.Slots(chunk_steps=32)
  made.enter(live(0, 5))
  made.enter(live(1, 100))
  assert made.context == 20
  # The chunk in which the first stops goes on for the second.
  assert made.to_next_stop() == 32
  made.advance(32.0)
  assert [each.name for each in made.pop_stopped()] == [(0, 0)]
  # Of 100 tokens 32 are there; the third chunk ends when nobody is left in it.
  assert made.context == 10 + 32
  assert made.to_next_stop() == 68
  made.advance(68.0)
  (last,) = made.pop_stopped()
  assert (last.sampled, last.context) == (100, 110)
  assert (made.steps, made.busy_steps) == (100, 32 * 2 + 68)
  assert made.context == 0 and len(made) == 0


def test_what_was_planned_for_an_earlier_entry_stops_nobody():
  made = slots.Slots(chunk_steps=1)
  made.enter(live(0, 10))
  made.enter(live(1, 50))
  made.advance(4.0)
  back = made.leave((0, 0))
  assert back.sampled == 4
  made.advance(3.0)
  made.enter(back)
  # It lacks 6 tokens from step 7 on; its first entry would have ended at 10.
  assert made.to_next_stop() == 6
  made.advance(3.0)
  assert made.pop_stopped() == []
  made.advance(3.0)
  assert [each.name for each in made.pop_stopped()] == [(0, 0)]


def test_the_youngest_is_who_entered_last():
  made = slots.Slots(chunk_steps=1)
  for member in range(3):
    made.enter(live(member, 10))
  made.enter(made.leave((0, 0)))
  assert made.youngest().name == (0, 0)
