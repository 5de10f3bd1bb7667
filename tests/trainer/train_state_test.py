"""The layout of the train state."""

import jax

from dora_jax.trainer import train_state
from tests.trainer import tiny


def test_moments_are_sharded_as_the_params():
  mesh = tiny.make_mesh(fsdp=2, tensor=2)
  shardings = train_state.state_shardings(tiny.POLICY, mesh, tiny.OPTIMIZER)
  params = jax.tree.leaves(shardings.params)
  assert len({sharding.spec for sharding in params}) > 1
  adam = shardings.opt_state[1][0]
  assert jax.tree.leaves(adam.mu) == params
  assert jax.tree.leaves(adam.nu) == params
  assert adam.count.is_fully_replicated
