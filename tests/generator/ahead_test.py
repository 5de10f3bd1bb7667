"""TPU programs, compiled without a TPU: needs libtpu, not the chips."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

# libtpu can be loaded by one process at a time and reads the environment; so
# the compilation has a process of its own.
_SCRIPT = """
import json, sys
import jax.numpy as jnp
from dora_jax.generator import ahead
from dora_jax.generator.attention import tpu
from dora_jax.model import transformer

topology, tensor, sizes, settings = json.loads(sys.argv[1])
mesh = ahead.describe_mesh(topology, tensor=tensor)
paged = tpu.TpuAttention(mesh=mesh)
config = transformer.ModelConfig(**sizes)
found = {}
compiled = ahead.compile_verbs(
  mesh, config, paged, dtype=jnp.bfloat16, **settings
)
for name, verb in compiled.items():
  memory = verb.memory_analysis()
  text = verb.as_text()
  found[name] = {
    "kernels": text.count('custom_call_target="tpu_custom_call"'),
    "names_kernel": "paged_attention" in text,
    "arguments": memory.argument_size_in_bytes,
    "reused": memory.alias_size_in_bytes,
    "outputs": memory.output_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
  }
print(json.dumps(found))
"""

_GIB = 2**30
_QWEN2_7B = {
  "vocab_size": 152064,
  "width": 3584,
  "mlp_width": 18944,
  "num_layers": 28,
  "num_heads": 28,
  "num_kv_heads": 4,
  "head_width": 128,
  "rope_theta": 1e6,
  "norm_eps": 1e-6,
  "qk_norm": False,
  "qkv_bias": True,
  "tied_head": False,
  "max_positions": 32768,
}
_QWEN2_1_5B = _QWEN2_7B | {
  "vocab_size": 151936,
  "width": 1536,
  "mlp_width": 8960,
  "num_heads": 12,
  "num_kv_heads": 2,
  "tied_head": True,
}


def _compile(topology, tensor, sizes, settings):
  """Memory and kernels of each verb, compiled in a process of its own."""
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    # There is no metadata server to ask which machine this is.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
  }
  arguments = json.dumps([topology, tensor, sizes, settings])
  done = subprocess.run(
    [sys.executable, "-c", _SCRIPT, arguments],
    env=environment,
    capture_output=True,
    text=True,
    timeout=500,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed: the extra 'tpu' has the one for this jax",
)
@pytest.mark.parametrize(
  ("topology", "tensor", "chip_gib", "sizes", "num_pages"),
  [
    # 256 slots of 4096 tokens: 14 GiB of pages on each chip.
    ("v5p:2x2x1", 4, 95, _QWEN2_7B, 16384),
    # 64 slots of 4096 tokens.
    ("v5e:2x4", 2, 16, _QWEN2_1_5B, 4096),
  ],
)
def test_decode_and_prefill_compile_for_tpus(
  topology, tensor, chip_gib, sizes, num_pages
):
  page_size = 64
  settings = {
    "num_slots": num_pages // 64,
    "num_pages": num_pages,
    "page_size": page_size,
    "max_length": 4096,
    "chunk_steps": 8,
    "prefill_chunk": 1024,
  }
  heads = sizes["num_kv_heads"] // tensor
  page_bytes = page_size * 2 * heads * sizes["head_width"] * 2
  pool_bytes = sizes["num_layers"] * num_pages * page_bytes
  found = _compile(topology, tensor, sizes, settings)
  assert found.keys() == {"decode", "prefill"}
  for name, verb in found.items():
    # One call, in the loop over layers: all attention is the kernel's.
    assert verb["kernels"] == 1, name
    assert verb["names_kernel"], name
    # The pool is updated where it is, and not even a layer of it is copied.
    assert pool_bytes <= verb["reused"] < 1.01 * pool_bytes, name
    assert verb["temporaries"] < pool_bytes / sizes["num_layers"], name
    new_bytes = verb["outputs"] - verb["reused"]
    total = verb["arguments"] + new_bytes + verb["temporaries"]
    print(
      f"{topology} {name}: {total / _GIB:.2f} of {chip_gib} GiB, of which pool "
      f"{pool_bytes / _GIB:.2f}, temporaries {verb['temporaries'] / _GIB:.2f}"
    )
    assert total < chip_gib * _GIB, name
