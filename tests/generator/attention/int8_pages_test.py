import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.generator.attention import int8_pages, xla
from tests.generator import tiny
from tests.generator.attention import paged


def test_a_row_is_rounded_by_its_largest():
  rows = jnp.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]])
  rounded, scale = int8_pages.quantize(rows)
  # 1 / (2 / 127) is 63.5, which goes to the even 64; 0.5 gives 31.75.
  assert rounded.tolist() == [[64, -127, 32], [0, 0, 0]]
  np.testing.assert_allclose(scale, [2 / 127, 1 / 127], rtol=1e-6)


def _answer(dtype):
  """Attention of a prompt of two pages and of the token after it."""
  mesh, config = tiny.make_mesh(2), paged.make_config(head_width=16)
  attention = xla.XlaAttention()
  pool = attention.create_pool(
    config, mesh=mesh, num_pages=5, page_size=8, dtype=dtype
  )
  table_RC = np.array([[3, 1, 4, 0]], np.int32)
  tokens = paged.draw_tokens(config, 0, 1, 16)
  outputs = []
  # The second block reads the pages of the first.
  for start in (0, 8):
    block = tuple(each[:, start : start + 8] for each in tokens)
    filled_RW = table_RC[:, start // 8 : start // 8 + 1]
    where = np.array([start], np.int32), table_RC, filled_RW
    out_RTKGH, pool = paged.prefill(attention, pool, block, *where)
    outputs.append(out_RTKGH)
  token = paged.draw_tokens(config, 1, 1, 1)
  out_RTKGH, pool = paged.decode(
    attention, pool, token, table_RC, np.array([16]), np.array([True])
  )
  return np.concatenate([*outputs, out_RTKGH], axis=1), pool


def test_attention_is_close_to_that_of_exact_pages():
  exact, _ = _answer(jnp.float32)
  rounded, pool = _answer(jnp.int8)
  assert pool.keys.rows.dtype == jnp.int8
  error = np.abs(rounded - exact).max(axis=(0, 2, 3, 4))
  # The first block reads no page.
  assert (error[:8] == 0).all() and (error[8:] > 0).all()
  assert error.max() < 0.03


@pytest.mark.slow
def test_a_request_that_moves_with_int8_pages_samples_the_same():
  requests = [
    tiny.make_request(1, member, length=11, max_new_tokens=9)
    for member in range(2)
  ]
  names = [(1, 0), (1, 1)]
  alone = tiny.make_lane(dtype=jnp.int8)
  expected = tiny.by_request(tiny.run(alone, requests))
  source = tiny.make_lane(dtype=jnp.int8)
  target = tiny.make_lane(dtype=jnp.int8, lanes=[(1, 4)], first=2)
  source.submit(requests)
  finished = source.step()
  target.restore(source.extract(names[1:]))
  source.forget(names[1:])
  source.spill(names[:1])
  finished += tiny.run(source) + tiny.run(target)
  assert tiny.by_request(finished) == expected
  assert target.counters.moved_in_tokens > 0
