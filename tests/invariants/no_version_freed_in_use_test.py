"""A version is freed when its last holder lets go, and never before."""

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


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
  st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=40)
)
def test_random_holders_always_find_their_version(moves):
  store = make_store()
  newest = 0
  store.publish(0, params_of(0), holder="coordinator")
  # (holder, version) -> whether it has been placed; the slow way to count.
  held: dict[tuple[str, int], bool] = {("coordinator", 0): True}
  arrays: list[tuple[int, weakref.ref]] = []
  for index, (kind, choice) in enumerate(moves):
    alive = sorted({version for _, version in held})
    if kind == 0:
      newest += 1
      store.publish(newest, params_of(newest), holder="coordinator")
      held["coordinator", newest] = True
    elif kind == 1:
      version = alive[choice % len(alive)]
      holder = f"generator {index}"
      store.reserve(version, holder=holder, mesh_id=choice % 2)
      held[holder, version] = False
    elif kind == 2:
      for holder, version in [k for k, placed in held.items() if not placed]:
        params = store.place(version, holder=holder)
        np.testing.assert_array_equal(np.asarray(params["a"]), float(version))
        held[holder, version] = True
        arrays.append((version, weakref.ref(params["a"])))
        del params
    else:
      # The newest stays held, as the coordinator sees to.
      loose = [k for k in held if k != ("coordinator", newest)]
      if loose:
        holder, version = loose[choice % len(loose)]
        store.release(version, holder=holder)
        del held[holder, version]
    assert store.versions() == sorted({version for _, version in held})
  gc.collect()
  alive = {version for _, version in held}
  assert all(ref() is None or version in alive for version, ref in arrays), (
    "a version that nobody holds still takes memory"
  )


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


def test_the_last_copy_stays_while_the_version_is_held():
  store = make_store()
  store.publish(0, params_of(0), holder="coordinator")
  store.reserve(0, holder="generator 0", mesh_id=0)
  store.place(0, holder="generator 0")
  # From here on the trainer's copy is gone.
  store.publish(1, params_of(1), holder="coordinator")
  store.release(0, holder="generator 0")
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
