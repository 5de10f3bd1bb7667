import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.model import linear

_SIZES = {"B": 2, "T": 3, "D": 8, "K": 2, "G": 3, "H": 4, "F": 5}


def _draw(term, seed):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=[_SIZES[a] for a in term]), jnp.float32)


@pytest.mark.parametrize(
  "spec", ["BTD,DF->BTF", "BTD,DKGH->BTKGH", "BTKGH,KGHD->BTD"]
)
def test_a_product_and_its_gradients_are_those_of_an_einsum(spec):
  values, weight = map(_draw, spec.split("->")[0].split(","), (0, 1))
  slopes = _draw(spec.split("->")[1], 2)

  def pull(product):
    out, back = jax.vjp(lambda *terms: product(spec, *terms), values, weight)
    return out, *back(slopes)

  for ours, expected in zip(
    pull(linear.product), pull(jnp.einsum), strict=True
  ):
    np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=1e-5)


def test_no_weight_is_turned_around_before_it_is_multiplied():
  terms = _draw("BTKGH", 0), _draw("KGHD", 1)
  for product, turns in ((linear.product, False), (jnp.einsum, True)):
    multiply = lambda *terms, product=product: product(
      "BTKGH,KGHD->BTD", *terms
    )
    text = jax.jit(multiply).lower(*terms).compile().as_text()
    assert text is not None
    assert ("transpose" in text) == turns


def test_an_order_that_no_product_gives_is_refused():
  with pytest.raises(ValueError, match="'BFT', but a product gives 'BTF'"):
    linear.product("BTD,DF->BFT", _draw("BTD", 0), _draw("DF", 1))
