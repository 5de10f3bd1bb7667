"""Activations times weights, with gradients that cost two products, no more.

Weights may be wider than activations: they are rounded for the product, while
their gradients are summed, and leave, in the weights' own dtype. So a
sum over devices or micro-batches is never in fewer digits than the masters.
"""

from typing import Any

import jax
from jaxtyping import Float

from dora_jax.model import turned


def product(
  spec: str,
  values: Float[jax.Array, "..."],
  weight: Float[jax.Array, "..."] | turned.Turned,
) -> Float[jax.Array, "..."]:
  """An einsum of activations and one weight, in the activations' dtype.

  JAX's own gradient of the weight is the transpose of a product that takes the
  incoming gradient first. On CPU that turns the wider of two arrays around:
  gate, up and down of a layer took 1.7 times as long with it.

  Args:
    spec: such as "BTD,DF->BTF"; each letter in exactly two of its three parts.
    values: activations.
    weight: of the same dtype, or a wider one. One that is turned has no
      gradient: generators have them.
  """
  if isinstance(weight, turned.Turned):
    of_values, of_weight = spec.split("->")[0].split(",")
    num_summed = sum(letter in of_weight for letter in of_values)
    return turned.product(values, weight.values, num_summed=num_summed)
  return _product(spec, values, weight)


def products(
  values: Float[jax.Array, "..."], *terms: tuple[str, Any]
) -> tuple[Float[jax.Array, "..."], ...]:
  """The same activations times several weights.

  Args:
    values: activations.
    *terms: (spec, weight) of each `product`. Those of a generator on a CPU may
      be joined: the first weight is a turned.Joined then.
  """
  _, first = terms[0]
  if isinstance(first, turned.Joined):
    return turned.joined_products(values, first)
  return tuple(product(spec, values, weight) for spec, weight in terms)


def _multiply(spec, values, weight):
  return _dot(spec, values, weight.astype(values.dtype))


def _dot(spec, left, right, dtype=None):
  """An einsum in which each axis lies as a product of matrices leaves it.

  jnp.einsum may name the axes that it sums over in another order than they lie
  in memory; where these are several, a CPU then copies both arrays first.
  """
  terms, out = spec.split("->")
  of_left, of_right = terms.split(",")
  shared = [letter for letter in of_left if letter in of_right]
  batched = [letter for letter in shared if letter in out]
  summed_over = [letter for letter in shared if letter not in out]
  kept = [each for each in of_left + of_right if each not in shared]
  given = "".join(batched + kept)
  if given != out:
    raise ValueError(f"{spec!r} wants {out!r}, but a product gives {given!r}.")
  return jax.lax.dot_general(
    left,
    right,
    (
      (_find(summed_over, of_left), _find(summed_over, of_right)),
      (_find(batched, of_left), _find(batched, of_right)),
    ),
    preferred_element_type=dtype,
  )


def _find(letters, term) -> tuple[int, ...]:
  """Where these letters are in a term."""
  return tuple(term.index(letter) for letter in letters)


def summed(
  spec: str,
  left: Float[jax.Array, "..."],
  right: Float[jax.Array, "..."],
  dtype: jax.typing.DTypeLike,
) -> Float[jax.Array, "..."]:
  """An einsum of arrays of one dtype, summed and returned in a wider one.

  On CPU the arrays are widened first, for XLA has no such product there of some
  shapes of bfloat16 ("Unsupported element type for DotThunk").
  """
  if left.dtype == dtype:
    return _dot(spec, left, right)
  return jax.lax.platform_dependent(
    left,
    right,
    cpu=lambda left, right: _dot(spec, left.astype(dtype), right.astype(dtype)),
    default=lambda left, right: _dot(spec, left, right, dtype),
  )


def _forward(spec, values, weight):
  return _multiply(spec, values, weight), (values, weight)


def _backward(spec, kept, grad_out):
  values, weight = kept
  terms, out = spec.split("->")
  of_values, of_weight = terms.split(",")
  grad_values = _dot(
    f"{out},{of_weight}->{of_values}", grad_out, weight.astype(values.dtype)
  )
  grad_weight = summed(
    f"{of_values},{out}->{of_weight}", values, grad_out, weight.dtype
  )
  return grad_values, grad_weight


_product: Any = jax.custom_vjp(_multiply, nondiff_argnums=(0,))
_product.defvjp(_forward, _backward)


def add_bias(
  values: Float[jax.Array, "..."], bias: Float[jax.Array, "..."]
) -> Float[jax.Array, "..."]:
  """Adds over the leading axes, in the wider of the two dtypes."""
  lead = (1,) * (values.ndim - bias.ndim)
  total = values.astype(bias.dtype) + bias.reshape(lead + bias.shape)
  return total.astype(values.dtype)
