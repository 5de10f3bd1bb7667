"""Sums over sequences against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.trainer import segments

# Two sequences and padding, then a row that one sequence fills.
_IDS_BT = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
_MASK_BT = np.array([[0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]], np.float32)
_VALUES_BT = np.array([[0, 3, 0, 5, 7, 0], [1, 2, 4, 8, 16, 32]], np.float32)


def test_sums_by_hand():
  ids_BT, values_BT = jnp.asarray(_IDS_BT), jnp.asarray(_VALUES_BT)
  sums_BT = segments.sums(values_BT, ids_BT)
  assert sums_BT.tolist() == [[3, 3, 12, 12, 12, 0], [63] * 6]
  means_BT = segments.means(values_BT, jnp.asarray(_MASK_BT), ids_BT)
  # Of sampled tokens: 1 and 2; a sequence without any is divided by 1.
  assert means_BT.tolist() == [[3, 3, 6, 6, 6, 0], [63] * 6]
  later_BT = segments.later_sums(values_BT, ids_BT)
  assert later_BT[0].tolist() == [3, 0, 12, 7, 0, 0]
  assert later_BT[1].tolist() == [62, 60, 56, 48, 32, 0]


def test_a_mean_has_the_gradient_of_a_mean():
  def first_of_second(values_BT):
    means_BT = segments.means(
      values_BT, jnp.asarray(_MASK_BT), jnp.asarray(_IDS_BT)
    )
    return means_BT[0, 2]

  gradient_BT = jax.grad(first_of_second)(jnp.asarray(_VALUES_BT))
  assert gradient_BT[0].tolist() == [0, 0, 0.5, 0.5, 0.5, 0]
  assert not gradient_BT[1].any()
