import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.weights import reshard


def mesh_of(start: int, shape: tuple[int, ...], names: tuple[str, ...]):
  devices = jax.devices()[start : start + int(np.prod(shape))]
  return jax.sharding.Mesh(np.array(devices).reshape(shape), names)


def sharded(mesh, *axes):
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def example_params(mesh):
  rng = np.random.default_rng(0)
  return {
    "a": jax.device_put(
      rng.normal(size=(8, 12)).astype(np.float32),
      sharded(mesh, "fsdp", "tensor"),
    ),
    "b": {
      "c": jax.device_put(
        rng.normal(size=(4,)).astype(np.float32), sharded(mesh)
      )
    },
  }


@pytest.mark.parametrize("num_targets", [1, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_arrives_is_what_was_sent(num_targets, dtype):
  params = example_params(mesh_of(0, (2, 2), ("fsdp", "tensor")))
  source = reshard.cast(params, dtype=dtype)
  target = mesh_of(4, (num_targets,), ("tensor",))
  moved = reshard.reshard(
    source,
    {"a": sharded(target, None, "tensor"), "b": {"c": sharded(target)}},
  )
  for name, was, now in [
    ("a", params["a"], moved["a"]),
    ("c", params["b"]["c"], moved["b"]["c"]),
  ]:
    np.testing.assert_array_equal(
      np.asarray(was.astype(dtype)), np.asarray(now), err_msg=name
    )
    assert set(now.devices()) == set(target.devices.flat)
  sums = reshard.checksums(source)
  reshard.check_equal(sums, reshard.checksums(moved))


def test_a_checksum_is_worked_out_by_hand():
  # 1.0 is 0x3F800000 and 2.0 is 0x40000000; places weigh 1 and 3.
  def mix(bits):
    return ((bits ^ (bits >> 15)) * 0x9E3779B1) % 2**32

  wanted = (mix(0x3F800000) + 3 * mix(0x40000000)) % 2**32
  assert reshard.checksums({"a": jnp.array([1.0, 2.0])}) == {"['a']": wanted}


@pytest.mark.parametrize(
  "change",
  [
    lambda a: a.at[0, 0].set(a[0, 0] + 1e-6),
    lambda a: a.at[jnp.array([0, 1])].set(a[jnp.array([1, 0])]),
    lambda a: a.T.reshape(a.shape),
  ],
  ids=["one value", "two rows swapped", "scrambled"],
)
def test_a_change_on_the_way_is_found(change):
  params = example_params(mesh_of(0, (1, 1), ("fsdp", "tensor")))
  other = {**params, "a": change(params["a"])}
  with pytest.raises(ValueError, match=r"\['a'\].*1 of 2 arrays"):
    reshard.check_equal(reshard.checksums(params), reshard.checksums(other))


def test_a_cast_copy_outlives_the_donated_original():
  params = {"a": jnp.arange(4.0)}
  copy = reshard.cast(params, dtype=jnp.float32)
  jax.jit(lambda p: {"a": p["a"] + 1.0}, donate_argnums=0)(params)
  assert params["a"].is_deleted()
  np.testing.assert_array_equal(np.asarray(copy["a"]), [0.0, 1.0, 2.0, 3.0])


def test_a_plan_that_does_not_fit_names_the_array():
  mesh = mesh_of(0, (1, 1), ("fsdp", "tensor"))
  target = mesh_of(4, (3,), ("tensor",))
  params = example_params(mesh)
  with pytest.raises(ValueError, match=r"only sent.*'c'"):
    reshard.plan(params, {"a": sharded(target)})
  with pytest.raises(ValueError, match=r"params\['a'\] of shape \(8, 12\)"):
    reshard.plan(
      params, {"a": sharded(target, "tensor"), "b": {"c": sharded(target)}}
    )
