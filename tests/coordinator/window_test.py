import hypothesis
import pytest
from hypothesis import strategies as st

from dora_jax.coordinator import window


@pytest.mark.parametrize(
  ("step", "k", "num_left", "allowed"),
  [
    # K = 0: nothing may be left of what could only be trained later.
    (0, 0, {}, True),
    (0, 0, {0: 1}, False),
    (5, 2, {3: 0, 4: 1}, True),
    # Version 3 would be trained at step 6 at the earliest: lag 3 > 2.
    (5, 2, {3: 1}, False),
    # Version 4 has step 6 alone, which holds 4 groups.
    (5, 2, {4: 4}, True),
    (5, 2, {4: 5}, False),
    # Versions 4 and 5 together have steps 6 and 7.
    (5, 2, {4: 3, 5: 5}, True),
    (5, 2, {4: 3, 5: 6}, False),
  ],
)
def test_r1_by_hand(step, k, num_left, allowed):
  blocking = window.blocking_version(
    step, max_staleness=k, prompts_per_batch=4, num_left=num_left
  )
  assert (blocking is None) is allowed


@pytest.mark.parametrize(
  ("version", "newest", "next_step", "k", "untrained", "room"),
  [
    # K = 0: one batch while the trainer rests, nothing while it trains.
    (3, 3, 3, 0, {}, 4),
    (3, 3, 3, 0, {3: 1}, 3),
    (3, 3, 4, 0, {}, 0),
    # K = 2, idle: (K + 1) P; training: K P.
    (3, 3, 3, 2, {}, 12),
    (3, 3, 4, 2, {}, 8),
    # Older work counts for every later version: 12 - (1 + 2 + 5).
    (3, 3, 3, 2, {1: 1, 2: 2, 3: 5}, 4),
    # A legacy version has its own, tighter cap: (2 + 2 - 3 + 1) 4 - 5 = 3.
    (2, 3, 3, 2, {1: 2, 2: 3}, 3),
    # … and must leave the newest its cap too: 12 - 11 = 1.
    (2, 3, 3, 2, {2: 3, 3: 8}, 1),
    # Never negative.
    (1, 3, 3, 2, {1: 9}, 0),
  ],
)
def test_r2_by_hand(version, newest, next_step, k, untrained, room):
  assert (
    window.admission_room(
      version,
      newest_version=newest,
      next_step=next_step,
      max_staleness=k,
      prompts_per_batch=4,
      num_untrained=untrained,
    )
    == room
  )


@hypothesis.given(
  k=st.integers(0, 3),
  batch=st.integers(1, 4),
  counts=st.lists(st.integers(0, 4), min_size=4, max_size=4),
  which=st.integers(0, 3),
)
def test_r2_is_the_most_that_the_steps_left_can_take(k, batch, counts, which):
  # The slow way: groups of version w must fit into the steps n … w + K, oldest
  # first; find the largest addition for which they all do.
  newest = next_step = 3
  # Versions below 3 - K have nothing untrained left, by R1.
  untrained = {v: n if v >= 3 - k else 0 for v, n in enumerate(counts)}
  which = max(which, 3 - k)

  def all_fit(extra):
    step, left = next_step, batch
    for version in range(newest + 1):
      for _ in range(untrained[version] + (extra if version == which else 0)):
        if step > version + k:
          return False
        left -= 1
        if not left:
          step, left = step + 1, batch
    return True

  hypothesis.assume(all_fit(0))
  most = max(extra for extra in range(60) if all_fit(extra))
  assert most == window.admission_room(
    which,
    newest_version=newest,
    next_step=next_step,
    max_staleness=k,
    prompts_per_batch=batch,
    num_untrained=untrained,
  )
