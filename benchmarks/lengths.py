"""How long each completion is, whoever generates it and whenever.

A benchmark of schedules must give all of them the same work. So a request does
not end where the policy stops, which would depend on the version that samples
it, but at a length that only its name decides.
"""

import numpy as np


def completion_length(
  group_id: int,
  member: int,
  *,
  seed: int,
  median: float,
  sigma: float,
  limit: int,
) -> int:
  """Draws one request's length in tokens, lognormal and clipped.

  length = clip(round(median * exp(sigma * z)), 1, limit), z ~ N(0, 1)

  With median 24, sigma 1.2 and limit 512 the mean is 0.09 of the limit, as in
  the paper's runs (2.4K of 30K; dora.md of the design, section 6), and the 99th
  percentile is 16 medians (theirs exceeds 10).

  Args:
    group_id: the group of the request.
    member: its place in the group.
    seed: of the workload.
    median: of the lengths before clipping, in tokens.
    sigma: deviation of their logarithm.
    limit: the longest, in tokens.
  """
  z = np.random.default_rng((seed, group_id, member)).standard_normal()
  return int(np.clip(round(median * np.exp(sigma * z)), 1, limit))
