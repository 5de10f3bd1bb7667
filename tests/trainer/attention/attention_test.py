"""Each way to attend within segments gives what the plain one gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.model import attention
from dora_jax.trainer.attention import choice, gpu, tpu, xla
from tests.trainer import tiny


def _segments(num_rows, num_tokens):
  """Rows of segments of odd lengths; padding at the end of every other."""
  rng = np.random.default_rng(0)
  segment_ids = np.zeros((num_rows, num_tokens), np.int32)
  for row in range(num_rows):
    end = num_tokens - 37 * (row % 2)
    cuts = np.sort(rng.choice(np.arange(1, end), row, replace=False))
    for index, part in enumerate(np.split(np.arange(end), cuts), start=1):
      segment_ids[row, part] = index
  return segment_ids


def _answer(attend, arrays, weights_BTKGH):
  """Output, and the gradients of a weighted sum of it."""

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
  def answer(query_BTKGH, key_BTKH, value_BTKH):
    out_BTKGH, _ = attend(
      query_BTKGH, key_BTKH, value_BTKH, None, jnp.zeros((), jnp.int32)
    )
    return jnp.sum(out_BTKGH * weights_BTKGH), out_BTKGH

  (_, out_BTKGH), grads = answer(*arrays)
  return out_BTKGH, *grads


_MESH = tiny.make_mesh(2, 1, 2)
_SPLIT = tiny.make_mesh(1, 4, 2)


@pytest.mark.parametrize(
  "ours, num_rows, num_tokens",
  [
    # Neither one block nor a whole number of them.
    (xla.XlaAttention(), 4, 300),
    (xla.XlaAttention(), 2, 40),
    # Each device has 75 queries, whose first block begins within one of keys.
    (xla.XlaAttention(mesh=_SPLIT), 3, 300),
    (tpu.TpuAttention(mesh=_MESH, interpret=True), 2, 256),
    (tpu.TpuAttention(mesh=_SPLIT, interpret=True), 3, 512),
    (gpu.GpuAttention(mesh=_MESH, interpret=True), 2, 128),
  ],
  ids=lambda value: getattr(value, "name", str(value)),
)
def test_output_and_gradients_are_those_of_plain_attention(
  ours, num_rows, num_tokens
):
  config = (2, 3, 16)
  keys = jax.random.split(jax.random.key(0), 4)
  draw = lambda key, *shape: jax.random.normal(
    key, (num_rows, num_tokens, *shape)
  )
  num_heads, num_queries, width = config
  arrays = (
    draw(keys[0], num_heads, num_queries, width),
    draw(keys[1], num_heads, width),
    draw(keys[2], num_heads, width),
  )
  weights = draw(keys[3], num_heads, num_queries, width)
  segment_ids = jnp.asarray(_segments(num_rows, num_tokens))
  found = _answer(ours.attend(segment_ids), arrays, weights)
  expected = _answer(attention.segment_attention(segment_ids), arrays, weights)
  for one, two in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, two, atol=2e-5)


def test_a_token_reads_from_where_its_segment_starts():
  segment_ids = jnp.asarray([[1, 1, 2, 2, 2, 0, 0], [3, 1, 1, 1, 0, 0, 0]])
  np.testing.assert_array_equal(
    xla.segment_starts(segment_ids),
    [[0, 0, 2, 2, 2, 5, 6], [0, 1, 1, 1, 4, 5, 6]],
  )


@pytest.mark.skipif(
  jax.__version_info__ >= (0, 11),
  reason="newer jax lowers for CUDA only where it is told of a device",
)
def test_the_kernel_of_gpus_lowers_to_triton_without_one():
  shape = lambda *sizes: jax.ShapeDtypeStruct((2, 128, *sizes), jnp.bfloat16)

  def total(query, key, value, segment_ids):
    out = gpu.attend_heads(query, key, value, segment_ids, interpret=False)
    return out.astype(jnp.float32).sum()

  traced = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(
    shape(2, 7, 64),
    shape(2, 64),
    shape(2, 64),
    jax.ShapeDtypeStruct((2, 128), jnp.int32),
  )
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  # Forward, the backward pass's preparation, and that pass.
  assert text.count("xla.gpu.triton") >= 2


def _choose(name, *, row_length=24):
  return choice.choose(
    name, tiny.make_mesh(), config=tiny.CONFIG, row_length=row_length
  ).name


def test_the_choice_is_by_device_and_may_be_overridden():
  assert _choose("auto") == _choose("xla") == "xla"
  with pytest.raises(ValueError, match=r"config\.trainer\.attention is 'tpu'"):
    _choose("tpu", row_length=256)
  with pytest.raises(ValueError, match=r"config\.trainer\.attention is 'cpu'"):
    _choose("cpu")
  # Head width 8 is below the least tile of the kernel for GPUs.
  for kernel, row_length, field in (
    (tpu.TpuAttention(mesh=_MESH), 24, "row_length"),
    (tpu.TpuAttention(mesh=_SPLIT), 256, "128 times config.mesh.trainer_seq"),
    (gpu.GpuAttention(mesh=_MESH), 24, "head_width"),
    (gpu.GpuAttention(mesh=_SPLIT), 64, "config.mesh.trainer_sequence is 4"),
  ):
    found = kernel.find_obstacle(tiny.CONFIG, row_length=row_length)
    assert found is not None and field in found
