"""Checkpoints: whole, into any layout, and as if nothing had happened."""

import resource

import jax
import numpy as np
import pytest

from dora_jax import checkpoint
from tests.trainer import tiny


def _assert_equal(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_resumed_equals_uninterrupted(tmp_path):
  trainer = tiny.make_trainer()
  trainer.train(tiny.make_groups(seed=0))
  saved = jax.device_get(trainer.state())
  checkpoints = checkpoint.Checkpoints(tmp_path, max_to_keep=2)
  checkpoints.save(1, trainer.state(), {"version": trainer.version})
  # Goes on at once: donating the state must not reach what is being written.
  metrics = trainer.train(tiny.make_groups(seed=1, version=1))
  checkpoints.close()

  resumed = tiny.make_trainer(params=tiny.make_params(seed=9))
  checkpoints = checkpoint.Checkpoints(tmp_path, max_to_keep=2)
  state, extras = checkpoints.restore(None, resumed.abstract_state())
  checkpoints.close()
  _assert_equal(jax.device_get(state), saved)
  resumed.restore(state, version=extras["version"])
  assert resumed.train(tiny.make_groups(seed=1, version=1)) == metrics
  _assert_equal(
    jax.device_get(resumed.state()), jax.device_get(trainer.state())
  )


def test_restores_into_another_layout(tmp_path):
  trainer = tiny.make_trainer(mesh=tiny.make_mesh(2, 2))
  checkpoints = checkpoint.Checkpoints(tmp_path, max_to_keep=1)
  checkpoints.save(0, trainer.state(), {})
  other = tiny.make_trainer(mesh=tiny.make_mesh(4, 1))
  state, _ = checkpoints.restore(0, other.abstract_state())
  checkpoints.close()
  _assert_equal(jax.device_get(state), jax.device_get(trainer.state()))
  same = jax.tree.map(
    lambda x, y: x.sharding == y.sharding, state, other.state()
  )
  assert all(jax.tree.leaves(same))


def test_keeps_the_newest_complete_steps(tmp_path):
  checkpoints = checkpoint.Checkpoints(tmp_path, max_to_keep=2)
  assert checkpoints.latest() is None
  abstract = {"x": jax.ShapeDtypeStruct((3,), np.float32)}
  with pytest.raises(FileNotFoundError, match=r"of steps \[\], need any"):
    checkpoints.restore(None, abstract)
  for step in (1, 2, 3):
    values = jax.numpy.full(3, step, np.float32)
    checkpoints.save(step, {"x": values}, {"ledger": {"ready": [step, None]}})
  checkpoints.close()
  # What a crash leaves behind is no checkpoint.
  (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
  checkpoints = checkpoint.Checkpoints(tmp_path, max_to_keep=2)
  assert checkpoints.latest() == 3
  state, extras = checkpoints.restore(None, abstract)
  np.testing.assert_array_equal(state["x"], [3.0, 3.0, 3.0])
  assert extras == {"ledger": {"ready": [3, None]}}
  state, _ = checkpoints.restore(2, abstract)
  np.testing.assert_array_equal(state["x"], [2.0, 2.0, 2.0])
  with pytest.raises(FileNotFoundError, match=r"of steps \[2, 3\], need 1"):
    checkpoints.restore(1, abstract)
  checkpoints.close()


def test_steps_are_kept_for_good_and_others_go_by_a_rename(tmp_path):
  checkpoints = checkpoint.Checkpoints(
    tmp_path, max_to_keep=1, keep_every_steps=2
  )
  for step in range(1, 6):
    checkpoints.save(step, {"x": jax.numpy.zeros(3)}, {})
  checkpoints.close()
  assert checkpoint.complete_steps(tmp_path) == [2, 4, 5]
  # A crash in the middle of a deletion leaves a part where no scan looks.
  part = tmp_path / ".deleted" / "3" / "state"
  part.mkdir(parents=True)
  assert checkpoint.complete_steps(tmp_path) == [2, 4, 5]
  checkpoint.Checkpoints(tmp_path, max_to_keep=1).close()
  assert not part.exists()


def test_further_trees_come_back_on_the_host(tmp_path):
  checkpoints = checkpoint.Checkpoints(tmp_path, max_to_keep=1)
  tree = {"3": {"w": np.arange(4, dtype=np.int8)}}
  checkpoints.save(1, {"x": jax.numpy.zeros(3)}, {}, versions=tree)
  found = checkpoints.tree(1, "versions", jax.tree.map(np.empty_like, tree))
  checkpoints.close()
  assert isinstance(found["3"]["w"], np.ndarray)
  _assert_equal(found, tree)


def test_what_does_not_fit_is_not_begun(tmp_path):
  checkpoints = checkpoint.Checkpoints(tmp_path, max_to_keep=1)
  checkpoints.save(1, {"x": jax.numpy.zeros(3)}, {})
  huge = {"x": jax.ShapeDtypeStruct((10**15,), np.float32)}
  with pytest.raises(
    checkpoint.SaveFailed,
    match=r"step 2 needs 4,000,000,001,048,576 bytes, but .* free: make room",
  ):
    checkpoints.save(2, huge, {})
  checkpoints.close()
  assert checkpoint.complete_steps(tmp_path) == [1]


def test_a_write_that_fails_leaves_the_steps_before_it(tmp_path):
  checkpoints = checkpoint.Checkpoints(tmp_path, max_to_keep=1)
  checkpoints.save(1, {"x": jax.numpy.zeros(3)}, {})
  checkpoints.wait()
  # Incompressible, and too long for a file.
  noise = jax.random.bits(jax.random.key(0), (2**20,))
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
  try:
    checkpoints.save(2, {"x": noise}, {})
    with pytest.raises(checkpoint.SaveFailed, match=r"step 2 .* steps \[1\]"):
      checkpoints.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert checkpoint.complete_steps(tmp_path) == [1]
  # The next one is written, and nothing is left of it at the next start: a
  # thread that failed may still have been writing a part until now.
  checkpoints.save(3, {"x": noise}, {})
  checkpoints.close()
  checkpoint.Checkpoints(tmp_path, max_to_keep=1).close()
  assert [each.name for each in tmp_path.iterdir()] == ["3"]


def test_other_shapes_are_refused(tmp_path):
  checkpoints = checkpoint.Checkpoints(tmp_path, max_to_keep=1)
  checkpoints.save(0, {"x": jax.numpy.zeros(3)}, {})
  with pytest.raises(ValueError, match="shape"):
    checkpoints.restore(0, {"x": jax.ShapeDtypeStruct((4,), np.float32)})
  checkpoints.close()
