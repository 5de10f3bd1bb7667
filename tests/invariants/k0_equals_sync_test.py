"""With K = 0, dora is the synchronous loop, bit for bit."""

import jax
import numpy as np
import pytest

from dora_jax import export
from dora_jax.parallel import meshes
from tests.runtime import tiny


@pytest.fixture(scope="module")
def params_of_sync(tmp_path_factory):
  return params_of(tmp_path_factory.mktemp("sync"), schedule="sync", lanes=1)


def params_of(workdir, *, schedule, lanes, chunks_ahead=0):
  config = tiny.config(
    coordinator__schedule=schedule,
    coordinator__max_staleness=0,
    coordinator__num_steps=4,
    mesh__lanes=lanes,
    generator__chunks_ahead=str(chunks_ahead),
    task__reward="tests.runtime.tiny_rewards:digits",
    evaluation__num_prompts=0,
  )
  assert tiny.run(config, workdir) == 0
  return export.restore(workdir, step=4).params


@pytest.mark.parametrize(("lanes", "chunks_ahead"), [(1, 1), (2, 0), (2, 1)])
def test_dora_at_k_0_makes_the_same_params(
  tmp_path, params_of_sync, lanes, chunks_ahead
):
  # The lanes change who samples what beside whom, and a host that is behind
  # when who enters; the samples do not change.
  params = params_of(
    tmp_path, schedule="dora", lanes=lanes, chunks_ahead=chunks_ahead
  )
  jax.tree.map(np.testing.assert_array_equal, params, params_of_sync)


def test_training_has_moved_the_params(params_of_sync, tmp_path):
  config = tiny.config()
  from dora_jax.runtime import pieces

  shape = pieces.make_model_config(config, pieces.make_tokenizer(config))
  mesh = meshes.make_trainer_mesh(
    jax.devices()[:1], fsdp=1, sequence=1, tensor=1
  )
  initial = pieces.make_params(config, shape, mesh)
  moved = jax.tree.map(
    lambda a, b: float(np.max(np.abs(np.asarray(a) - np.asarray(b)))),
    initial,
    params_of_sync,
  )
  assert min(jax.tree.leaves(moved)) > 1e-4
