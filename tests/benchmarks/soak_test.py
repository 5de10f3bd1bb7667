import numpy as np

from benchmarks import soak


def _draw(rng, num_times, alike):
  """Memory at times, each like the one before."""
  noise = rng.normal(size=num_times)
  for at in range(1, num_times):
    noise[at] += alike * noise[at - 1]
  return noise * 1e5


def test_the_error_of_a_slope_knows_that_neighbours_are_alike():
  rng = np.random.default_rng(0)
  found = np.array([soak.slope(_draw(rng, 100, 0.7)) for _ in range(300)])
  slopes, errors = found.T
  # Of independent ones it would be 0.42 of the slopes' real deviation.
  assert 0.8 < np.median(errors) / slopes.std() < 1.2
  assert (slopes > 2 * errors).mean() < 0.08


def test_what_grows_is_found():
  rng = np.random.default_rng(1)
  memory = _draw(rng, 100, 0.7) + 500 * soak._EVERY * np.arange(100)
  gradient, error = soak.slope(memory)
  assert abs(gradient - 500) < 3 * error and gradient > 5 * error
