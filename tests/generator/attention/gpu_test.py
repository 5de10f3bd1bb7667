import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from dora_jax.generator.attention import gpu, gpu_kernel, xla
from tests.generator import tiny
from tests.generator.attention import paged


@pytest.mark.parametrize("prefills_by", ["kernel", "xla"])
def test_it_gives_what_xla_gives(prefills_by):
  mesh = tiny.make_mesh(2)
  # Three queries a head do not fill a tile.
  config = paged.make_config(num_queries=3, head_width=16)
  ours = gpu.GpuAttention(mesh=mesh, prefills_by=prefills_by, interpret=True)
  found, pool = paged.answer(ours, mesh, config, page_size=16)
  other, other_pool = paged.answer(
    xla.XlaAttention(), mesh, config, page_size=16
  )
  for one, two in zip(found, other, strict=True):
    np.testing.assert_allclose(one, two, atol=2e-6, rtol=0)
  # Page 0 is the trash page.
  key_LJKHO = np.asarray(pool.keys).swapaxes(3, 4)
  np.testing.assert_array_equal(
    key_LJKHO[:, 1:], np.asarray(other_pool.keys)[:, 1:]
  )
  np.testing.assert_array_equal(
    np.asarray(pool.values)[:, 1:], np.asarray(other_pool.values)[:, 1:]
  )


_LOWERS_WITHOUT_A_DEVICE = pytest.mark.skipif(
  jax.__version_info__ >= (0, 11),
  reason="newer jax lowers for CUDA only where it is told of a device",
)


@_LOWERS_WITHOUT_A_DEVICE
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_the_kernel_lowers_to_triton_without_a_gpu(dtype, num_tokens):
  pool = jax.ShapeDtypeStruct((2, 9, 2, 64, 128), dtype)
  ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  attend = jax.jit(functools.partial(gpu_kernel.attend_pages, interpret=False))
  query = jax.ShapeDtypeStruct((4, num_tokens, 2, 7, 128), dtype)
  traced = attend.trace(query, pool, pool, ints(4, 3), ints(4), ints(1))
  lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert lowered.count("xla.gpu.triton") == 1


@_LOWERS_WITHOUT_A_DEVICE
def test_prefill_in_bfloat16_lowers_to_cudnn_without_a_gpu(monkeypatch):
  # JAX asks the library, which is not here, for its version.
  monkeypatch.setattr(
    fused_attention_stablehlo, "check_cudnn_version", lambda: 91000
  )
  mesh, dtype = tiny.make_mesh(2), jnp.bfloat16
  config = paged.make_config(num_queries=7)
  ours = gpu.GpuAttention(mesh=mesh, prefills_by=gpu.prefills_by(config, dtype))
  pool = ours.create_pool(
    config, mesh=mesh, num_pages=9, page_size=64, dtype=dtype
  )
  tokens = paged.draw_tokens(config, 0, 2, 64, dtype)
  ints = lambda *shape: jnp.zeros(shape, jnp.int32)
  traced = paged.prefill.trace(
    ours, pool, tokens, ints(2), ints(2, 4), ints(2, 1)
  )
  lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
  # Tables of 1, 2 and 4 pages; none attends by anything else.
  assert lowered.count("custom_call @__cudnn$fmha") == 3
  assert "xla.gpu.triton" not in lowered


def test_what_cudnn_has_no_attention_for_is_prefilled_by_the_kernel():
  narrow, wide = paged.make_config(), paged.make_config(head_width=256)
  assert gpu.prefills_by(narrow, jnp.bfloat16) == "cudnn"
  assert gpu.prefills_by(narrow, jnp.float32) == "kernel"
  assert gpu.prefills_by(wide, jnp.bfloat16) == "kernel"
