"""Where copies come from and go to; several threads on one store."""

import gc
import sys
import threading
import weakref
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.weights import reshard
from dora_jax.weights import store as store_lib

_NUM_ARRAYS = 4
# Four arrays of 2 x 6 in bfloat16.
_NUM_BYTES = _NUM_ARRAYS * 2 * 6 * 2


def make_store(num_meshes: int):
  """The trainer has devices 0 and 1; each mesh has one of the next."""
  return store_lib.WeightStore(
    shardings={
      mesh_id: {
        f"a{i}": jax.sharding.SingleDeviceSharding(jax.devices()[2 + mesh_id])
        for i in range(_NUM_ARRAYS)
      }
      for mesh_id in range(num_meshes)
    },
    dtype=jnp.bfloat16,
  )


def params_of(version: int):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("fsdp",))
  sharding = jax.sharding.NamedSharding(
    mesh, jax.sharding.PartitionSpec("fsdp")
  )
  return {
    f"a{i}": jax.device_put(
      np.full((2, 6), version + 64 * i, np.float32), sharding
    )
    for i in range(_NUM_ARRAYS)
  }


def serve(store, version, mesh_id):
  store.reserve(version, holder=f"generator {mesh_id}", mesh_id=mesh_id)
  return store.place(version, holder=f"generator {mesh_id}")


def check_is(params, version, mesh_id):
  for i in range(_NUM_ARRAYS):
    array = params[f"a{i}"]
    np.testing.assert_array_equal(
      np.asarray(array.astype(jnp.float32)), version + 64 * i
    )
    assert array.devices() == {jax.devices()[2 + mesh_id]}


def test_a_version_comes_from_the_nearest_copy():
  store = make_store(6)
  store.publish(0, params_of(0), holder="coordinator")
  check_is(serve(store, 0, 5), 0, 5)
  assert store.copied_from == {"trainer": 1}
  # The trainer still has its copy, and is left alone.
  check_is(serve(store, 0, 1), 0, 1)
  assert store.copied_from == {"trainer": 1, "peer": 1}
  # A second lane of a mesh takes what is there.
  store.reserve(0, holder="lane", mesh_id=1)
  check_is(store.place(0, holder="lane"), 0, 1)
  assert store.copied_from == {"trainer": 1, "peer": 1}
  store.publish(1, params_of(1), holder="coordinator")
  check_is(serve(store, 1, 2), 1, 2)
  assert store.copied_from == {"trainer": 2, "peer": 1}


def test_the_last_copy_goes_to_the_host_and_comes_back():
  store = make_store(2)
  store.publish(0, params_of(0), holder="coordinator")
  params = serve(store, 0, 0)
  alive = [weakref.ref(leaf) for leaf in jax.tree.leaves(params)]
  del params
  store.publish(1, params_of(1), holder="coordinator")
  assert store.host_bytes == 0
  store.release(0, holder="generator 0")
  gc.collect()
  assert all(ref() is None for ref in alive)
  assert store.host_bytes == _NUM_BYTES
  check_is(serve(store, 0, 1), 0, 1)
  assert store.copied_from == {"trainer": 1, "host": 1}
  # A peer goes before the host, whose copy stays while the version lives.
  check_is(serve(store, 0, 0), 0, 0)
  assert store.copied_from == {"trainer": 1, "host": 1, "peer": 1}
  for holder in ["generator 0", "generator 1"]:
    store.release(0, holder=holder)
  assert store.host_bytes == _NUM_BYTES
  store.release(0, holder="coordinator")
  assert store.host_bytes == 0 and store.versions() == [1]


def test_what_another_lane_of_the_mesh_wants_stays_there():
  store = make_store(1)
  store.publish(0, params_of(0), holder="coordinator")
  serve(store, 0, 0)
  store.reserve(0, holder="lane", mesh_id=0)
  store.publish(1, params_of(1), holder="coordinator")
  store.release(0, holder="generator 0")
  assert store.host_bytes == 0
  check_is(store.place(0, holder="lane"), 0, 0)
  assert store.copied_from == {"trainer": 1}


def test_memory_is_flat_over_many_versions():
  store = make_store(2)
  sizes = []
  for version in range(40):
    store.publish(version, params_of(version), holder="coordinator")
    mesh_id = version % 2
    serve(store, version, mesh_id)
    if version:
      # The one before leaves its mesh, waits on the host, and is let go.
      store.release(version - 1, holder=f"generator {1 - mesh_id}")
      assert store.host_bytes == _NUM_BYTES
      store.release(version - 1, holder="coordinator")
    assert store.host_bytes == 0 and store.versions() == [version]
    sizes.append(sum(array.nbytes for array in jax.live_arrays()))
  assert max(sizes[1:]) == min(sizes[1:])


def test_a_newest_version_needs_no_host_copy():
  store = make_store(1)
  store.publish(0, params_of(0), holder="coordinator")
  serve(store, 0, 0)
  store.release(0, holder="generator 0")
  assert store.host_bytes == 0
  check_is(serve(store, 0, 0), 0, 0)
  assert store.copied_from == {"trainer": 2}


def test_what_the_host_has_is_a_copy_of_its_own():
  for leaf in [jnp.arange(6.0), params_of(1)["a0"]]:
    host = reshard.to_host(leaf)
    np.testing.assert_array_equal(host, np.asarray(leaf))
    assert not np.shares_memory(host, np.asarray(leaf))
    with pytest.raises(ValueError, match="read-only"):
      host[...] = 0.0


def drive_mesh(store, mesh_id, versions, num_rounds, barrier):
  """Serves and leaves versions at random, as the thread of a mesh does."""
  rng = np.random.default_rng(mesh_id)
  for _ in range(num_rounds):
    version = int(rng.choice(versions))
    comes_late, leaves_first = rng.integers(2, size=2)
    # Half come at once; the others while half of these leave.
    barrier.wait(timeout=60)
    if not comes_late:
      check_is(serve(store, version, mesh_id), version, mesh_id)
    barrier.wait(timeout=60)
    if comes_late:
      check_is(serve(store, version, mesh_id), version, mesh_id)
    if leaves_first:
      store.release(version, holder=f"generator {mesh_id}")
    barrier.wait(timeout=60)
    if not leaves_first:
      store.release(version, holder=f"generator {mesh_id}")


def test_threads_that_come_and_go_never_lose_a_held_version():
  num_meshes, versions = 3, [0, 1]
  store = make_store(num_meshes)
  for version in [*versions, 2]:
    store.publish(version, params_of(version), holder="coordinator")
  barrier = threading.Barrier(num_meshes)

  def drive(mesh_id):
    try:
      drive_mesh(store, mesh_id, versions, 60, barrier)
    except BaseException:
      # So that the others, which wait for it, do not hide what it met.
      barrier.abort()
      raise

  interval_s = sys.getswitchinterval()
  # Threads change places between almost any two steps.
  sys.setswitchinterval(1e-6)
  try:
    with futures.ThreadPoolExecutor(num_meshes) as pool:
      driven = [pool.submit(drive, mesh_id) for mesh_id in range(num_meshes)]
    errors = [future.exception() for future in driven]
    is_other = lambda error: isinstance(error, threading.BrokenBarrierError)
    for error in sorted(filter(None, errors), key=is_other):
      raise error
  finally:
    sys.setswitchinterval(interval_s)
  # Each of the two has left all meshes, so it is on the host alone.
  assert store.host_bytes == len(versions) * _NUM_BYTES
  assert store.copied_from["host"] > 0 and store.copied_from["peer"] > 0
  assert store.copied_from["trainer"] <= num_meshes * len(versions)
  for version in versions:
    store.release(version, holder="coordinator")
  assert store.host_bytes == 0 and store.versions() == [2]


def test_a_mesh_that_is_lost_leaves_its_versions_on_the_host():
  store = make_store(2)
  for version in range(3):
    store.publish(version, params_of(version), holder="coordinator")
    serve(store, version, 0)
    if version == 1:
      serve(store, version, 1)
  store.reserve(0, holder="lane", mesh_id=0)
  store.reserve(2, holder="lane", mesh_id=0)
  # Version 1 is on mesh 1 too, and of version 2 the trainer has a copy.
  assert store.lose(0, ["generator 0", "lane"]) == []
  assert store.versions() == [0, 1, 2]
  assert store.host_bytes == _NUM_BYTES
  check_is(serve(store, 0, 1), 0, 1)
  assert store.copied_from["host"] == 1
  for version in range(3):
    store.release(version, holder="coordinator")
  assert store.versions() == [0, 1]
  for version in range(2):
    store.release(version, holder="generator 1")
  assert store.versions() == [] and store.host_bytes == 0


def test_a_version_whose_last_copy_cannot_be_read_is_lost():
  store = make_store(2)
  store.publish(0, params_of(0), holder="coordinator")
  params = serve(store, 0, 0)
  store.publish(1, params_of(1), holder="coordinator")
  for leaf in jax.tree.leaves(params):
    leaf.delete()
  assert store.lose(0, ["generator 0"]) == [0]
  assert store.versions() == [1]


def test_what_arrives_damaged_is_sent_again_from_another_copy():
  store = make_store(3)
  store.publish(0, params_of(0), holder="coordinator")
  serve(store, 0, 0)
  spoil(store._versions[0].copies[0])
  # The peer is asked first, and has other bits by now.
  check_is(serve(store, 0, 1), 0, 1)
  assert store.num_retried == 1
  assert store.copied_from == {"trainer": 2}


def test_what_arrives_damaged_twice_is_refused_and_serves_nobody():
  store = make_store(2)
  store.publish(0, params_of(0), holder="coordinator")
  serve(store, 0, 0)
  store.publish(1, params_of(1), holder="coordinator")
  spoil(store._versions[1].source)
  with pytest.raises(reshard.Damaged, match=r"checksums of \[\"\['a2'\]\"\]"):
    serve(store, 1, 1)
  # What was served before still is, and can be had.
  check_is(serve(store, 0, 1), 0, 1)


def spoil(params):
  """Replaces an array by one that differs from it in one place."""
  params["a2"] = params["a2"].at[0, 0].set(-1.0)
