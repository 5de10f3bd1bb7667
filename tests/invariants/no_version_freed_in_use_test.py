"""A version is freed when its last holder lets go, and never before.

Until then it is somewhere: on devices where holders want it, or on the host.
"""

import gc
import weakref

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dora_jax.weights import store as store_lib


def make_store():
  shardings = {
    mesh_id: {
      "a": jax.sharding.SingleDeviceSharding(jax.devices()[1 + mesh_id])
    }
    for mesh_id in range(2)
  }
  return store_lib.WeightStore(shardings=shardings, dtype=jnp.float32)


def params_of(version: int):
  return {"a": jnp.full((3,), float(version))}


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
  st.lists(
    st.tuples(
      st.sampled_from(["publish"] + 2 * ["reserve", "place", "release"]),
      st.integers(0, 99),
    ),
    min_size=30,
    max_size=60,
  )
)
def test_random_holders_always_find_their_version(moves):
  store = make_store()
  newest = 0
  store.publish(0, params_of(0), holder="coordinator")
  # (holder, version) -> whether it has been placed; the slow way to count.
  held: dict[tuple[str, int], bool] = {("coordinator", 0): True}
  mesh_of: dict[str, int] = {}
  arrays: list[tuple[int, int, weakref.ref]] = []
  for index, (kind, choice) in enumerate(moves):
    alive = sorted({version for _, version in held})
    if kind == "publish":
      newest += 1
      store.publish(newest, params_of(newest), holder="coordinator")
      held["coordinator", newest] = True
    elif kind == "reserve":
      version = alive[choice % len(alive)]
      holder = f"generator {index}"
      mesh_of[holder] = choice // 50
      store.reserve(version, holder=holder, mesh_id=mesh_of[holder])
      held[holder, version] = False
    elif kind == "place":
      for holder, version in [k for k, placed in held.items() if not placed]:
        params = store.place(version, holder=holder)
        np.testing.assert_array_equal(np.asarray(params["a"]), float(version))
        held[holder, version] = True
        arrays.append((version, mesh_of[holder], weakref.ref(params["a"])))
        del params
    else:
      # The newest stays held, as the coordinator sees to.
      loose = [k for k in held if k != ("coordinator", newest)]
      if loose:
        holder, version = loose[choice % len(loose)]
        store.release(version, holder=holder)
        del held[holder, version]
    alive = {version for _, version in held}
    assert store.versions() == sorted(alive)
    # At most one host copy of each but the newest, which the trainer keeps.
    assert store.host_bytes <= 12 * (len(alive) - 1)
    assert store.host_bytes % 12 == 0
    wanted = {
      (version, mesh_of[holder])
      for (holder, version), is_placed in held.items()
      if is_placed and holder in mesh_of
    }
    reserved = {
      (version, mesh_of[holder])
      for holder, version in held
      if holder in mesh_of
    }
    there = {(v, m) for v, m, ref in arrays if ref() is not None}
    assert wanted <= there <= reserved, (
      "a device copy has gone too early, or still takes memory"
    )
  for holder, version in held:
    store.release(version, holder=holder)
  assert store.versions() == [] and store.host_bytes == 0
  gc.collect()
  assert all(ref() is None for _, _, ref in arrays)


def test_a_version_cannot_go_between_reserve_and_place():
  store = make_store()
  store.publish(0, params_of(0), holder="coordinator")
  store.reserve(0, holder="generator 0", mesh_id=0)
  store.publish(1, params_of(1), holder="coordinator")
  store.release(0, holder="coordinator")
  params = store.place(0, holder="generator 0")
  np.testing.assert_array_equal(np.asarray(params["a"]), 0.0)
  # The trainer's copy is gone now; a later holder is served by a peer.
  store.reserve(0, holder="generator 1", mesh_id=1)
  assert store.place(0, holder="generator 1")["a"].devices() == {
    jax.devices()[2]
  }


def test_the_last_copy_survives_on_the_host_while_the_version_is_held():
  store = make_store()
  store.publish(0, params_of(0), holder="coordinator")
  store.reserve(0, holder="generator 0", mesh_id=0)
  store.place(0, holder="generator 0")
  # From here on the trainer's copy is gone.
  store.publish(1, params_of(1), holder="coordinator")
  store.release(0, holder="generator 0")
  assert store.host_bytes == 12
  store.reserve(0, holder="generator 1", mesh_id=1)
  params = store.place(0, holder="generator 1")
  np.testing.assert_array_equal(np.asarray(params["a"]), 0.0)


def test_misuse_is_named():
  store = make_store()
  publication = store.publish(3, params_of(3), holder="coordinator")
  assert publication.num_changed == 1 and publication.num_bytes == 12
  with pytest.raises(
    ValueError, match="Version 2 is published after version 3"
  ):
    store.publish(2, params_of(2), holder="coordinator")
  with pytest.raises(ValueError, match=r"Version 1 is not in the store.*\[3\]"):
    store.reserve(1, holder="generator 0", mesh_id=0)
  with pytest.raises(
    ValueError, match="generator 0 has not reserved version 3"
  ):
    store.place(3, holder="generator 0")
  with pytest.raises(
    ValueError, match="lets go of version 3, which it does not"
  ):
    store.release(3, holder="generator 0")
  # Publishing unchanged weights is seen.
  assert store.publish(4, params_of(3), holder="coordinator").num_changed == 0
