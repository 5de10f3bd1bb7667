"""The two rules that bound staleness without throwing anything away.

Both speak of groups: a group has one version, and counts as a whole. Source:
DORA, arXiv 2604.26256, section 3 for the window; R1 and R2 are our reading of
it, which bounds the lag of every trajectory by K whichever way the window is
counted.
"""

from collections.abc import Mapping


def is_step_allowed(
  step: int, *, max_staleness: int, num_unfinished: Mapping[int, int]
) -> bool:
  """Says whether R1 lets this step start.

  R1: step s may start only if no unfinished trajectory has version <= s - K,
  since it could then be trained at step s + 1 at the earliest, with lag > K.

  Args:
    step: s, the step that makes version s + 1.
    max_staleness: K.
    num_unfinished: version -> its groups that are not yet ready for training.
  """
  return not any(
    count and version <= step - max_staleness
    for version, count in num_unfinished.items()
  )


def admission_room(
  version: int,
  *,
  newest_version: int,
  next_step: int,
  max_staleness: int,
  prompts_per_batch: int,
  num_untrained: Mapping[int, int],
) -> int:
  """Computes how many groups of a version R2 lets start now.

  R2: for every version w, the started but untrained groups of versions <= w
  number at most (w + K - n + 1) * P: they fit into the steps n … w + K that are
  left before the bound would reach them. A new group of version v counts for
  every w >= v.

  Args:
    version: v, of the groups that would start.
    newest_version: the newest version that exists.
    next_step: n, the next step to start.
    max_staleness: K.
    prompts_per_batch: P, groups that a step consumes.
    num_untrained: version -> its groups that run or wait for a step; those in
      the step that is being made are no longer counted.

  Returns:
    A count of groups, at least 0.
  """
  room = None
  num_older = sum(n for w, n in num_untrained.items() if w < version)
  for bound in range(version, newest_version + 1):
    num_older += num_untrained.get(bound, 0)
    cap = (bound + max_staleness - next_step + 1) * prompts_per_batch
    room = cap - num_older if room is None else min(room, cap - num_older)
  return max(0, room or 0)
