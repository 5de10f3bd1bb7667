import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.generator.attention import tpu, xla
from tests.generator import tiny
from tests.generator.attention import paged


# A head of 64 is padded.
@pytest.mark.parametrize(("tensor", "head_width"), [(1, 64), (2, 128)])
def test_the_kernel_gives_what_xla_gives(tensor, head_width):
  mesh = tiny.make_mesh(tensor)
  config = paged.make_config(head_width=head_width)
  ours = tpu.TpuAttention(mesh=mesh, interpret=True)
  found, pool = paged.answer(ours, mesh, config, page_size=16)
  expected, expected_pool = paged.answer(
    xla.XlaAttention(), mesh, config, page_size=16
  )
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, atol=2e-6, rtol=0)
  # Page 0 is the trash page.
  key_LJKOH, value_LJKOH = _by_head(
    np.asarray(pool.keys)[:, 1:, ..., :head_width]
  )
  np.testing.assert_array_equal(
    key_LJKOH.swapaxes(3, 4), np.asarray(expected_pool.keys)[:, 1:]
  )
  np.testing.assert_array_equal(
    value_LJKOH, np.asarray(expected_pool.values)[:, 1:]
  )


def _by_head(pool_LJWKERH):
  """Keys and values, each with a page of [K, O, H]."""
  kv_ELJKWRH = pool_LJWKERH.transpose(4, 0, 1, 3, 2, 5, 6)
  *sizes, num_sets, num_rows, width = kv_ELJKWRH.shape
  return kv_ELJKWRH.reshape(*sizes, num_sets * num_rows, width)


def test_a_page_that_has_its_kv_is_read_and_not_written():
  mesh, config, page_size = tiny.make_mesh(1), paged.make_config(), 16
  ours = tpu.TpuAttention(mesh=mesh, interpret=True)
  pool = ours.create_pool(
    config, mesh=mesh, num_pages=9, page_size=page_size, dtype=jnp.float32
  )
  pool = jax.tree.map(lambda kv: kv * jnp.nan, pool)
  tokens = paged.draw_tokens(config, 0, 1, 2 * page_size)
  start_R, table_RC = np.zeros(1, np.int32), np.array([[5, 2]], np.int32)
  whole_RTKGH, whole = paged.prefill(
    ours, pool, tokens, start_R, table_RC, table_RC
  )
  pool = dataclasses.replace(
    pool, keys=pool.keys.at[:, 5].set(whole.keys[:, 5])
  )
  out_RTKGH, pool = paged.prefill(
    ours, pool, tokens, start_R, table_RC, np.array([[0, 2]], np.int32)
  )
  np.testing.assert_array_equal(out_RTKGH, whole_RTKGH)
  np.testing.assert_array_equal(pool.keys[:, 1:], whole.keys[:, 1:])
