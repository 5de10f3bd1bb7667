"""The two rules that bound staleness without throwing anything away.

Both speak of groups: a group has one version, and counts as a whole. K is
`max_staleness`, P the groups of a batch. Source: DORA, arXiv 2604.26256,
section 3 for the window; the rules are our reading of it, and bound the lag of
every trajectory by K whichever way the window is counted.
"""

from collections.abc import Mapping


def blocking_version(
  step: int,
  *,
  max_staleness: int,
  prompts_per_batch: int,
  num_left: Mapping[int, int],
) -> int | None:
  """Says which version R1 has this step wait for, None where it may start.

  R1: step s may start only if for every version w the groups of versions <= w
  that it leaves untrained, finished or not, number at most (w + K - s) * P:
  they fit into the steps s + 1 … w + K that are left for them.

  For w = s - K this says that nothing of version <= s - K may be left. That
  case alone would not do: where several old groups are still running, newer
  ones could take their places in one batch after another, until more of them
  are left than the last allowed step can hold.

  Args:
    step: s, the step that makes version s + 1.
    max_staleness: K.
    prompts_per_batch: P.
    num_left: version -> its groups, running or ready, outside of the batch.
  """
  num_older = 0
  for version in sorted(num_left):
    num_older += num_left[version]
    room = (version + max_staleness - step) * prompts_per_batch
    if num_older > max(0, room):
      return version
  return None


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
