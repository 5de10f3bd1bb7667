import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_jax.model import linear, turned

_SIZES = {"B": 5, "T": 3, "D": 24, "K": 2, "G": 3, "H": 4, "F": 40}


def _draw(*shape, seed):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
  "spec", ["BTD,DF->BTF", "BTD,DKGH->BTKGH", "BTKGH,KGHD->BTD"]
)
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_a_turned_weight_gives_the_products_of_an_einsum(spec, num_rows):
  sizes = _SIZES | {"B": num_rows}
  terms = spec.split("->")[0].split(",")
  values, weight = (
    _draw(*(sizes[axis] for axis in term), seed=seed)
    for seed, term in enumerate(terms)
  )
  num_summed = 3 if terms[1] == "KGHD" else 1
  out = linear.product(spec, values, turned.turn(weight, num_summed))
  expected = jnp.einsum(spec, values, weight)
  np.testing.assert_allclose(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [24, 128])
def test_a_row_comes_out_the_same_wherever_it_stands(width):
  weight = _draw(96, width, seed=0)
  rows = _draw(63, width, seed=1)
  product = jax.jit(turned.product)
  whole = np.asarray(product(rows, weight))
  rng = np.random.default_rng(2)
  for num_rows in (1, 2, 7, 8, 9, 16, 17, 24, 31, 33, 48, 62):
    chosen = rng.permutation(63)[:num_rows]
    np.testing.assert_array_equal(
      np.asarray(product(rows[chosen], weight)), whole[chosen]
    )


def test_few_rows_are_multiplied_without_packing_the_weight():
  # XLA swaps operands where it may, and would then pack what comes second.
  compile_for = lambda num_rows: str(
    jax.jit(lambda rows, weight: turned.product(rows, weight) + 1)
    .lower(jnp.zeros((num_rows, 24)), jnp.zeros((96, 24)))
    .compile()
    .as_text()
  )
  assert "f32[96,16]" in compile_for(16)
  assert "f32[96,64]" not in compile_for(64)


def test_a_split_matrix_stays_split_by_the_same_axis():
  mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
  where = NamedSharding(mesh, PartitionSpec(None, "tensor"))
  weight = jax.device_put(_draw(24, 2, 3, 4, seed=0), where)
  values = turned.turn(weight, 1).values
  assert values.shape == (2, 3, 4, 24)
  assert values.sharding.spec[0] == "tensor"
  assert values.addressable_shards[0].data.shape == (1, 3, 4, 24)


def test_joined_matrices_give_the_products_of_each_bit_by_bit():
  rows = _draw(2, 3, 24, seed=0)
  weights = [_draw(24, *shape, seed=1) for shape in ((2, 3, 4), (2, 4), (5,))]
  each = [turned.turn(weight, 1) for weight in weights]
  joined = turned.join(each)
  found = turned.joined_products(rows, joined)
  assert [out.shape for out in found] == [
    (2, 3, 2, 3, 4),
    (2, 3, 2, 4),
    (2, 3, 5),
  ]
  for out, weight in zip(found, each, strict=True):
    alone = turned.product(rows, weight.values)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(alone))
