"""A train step compiled for TPUs without one: needs libtpu, not the chips."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

# libtpu can be loaded by one process at a time and reads the environment; so
# the compilation has a process of its own.
_SCRIPT = """
import json
import sys
import jax.numpy as jnp
from dora_jax.model import transformer
from dora_jax.parallel import axes
from dora_jax.trainer import ahead, gradients
from dora_jax.trainer.attention import choice
from tests.trainer import tiny

config = transformer.ModelConfig(
  vocab_size=152064, width=3584, mlp_width=18944, num_layers=28, num_heads=28,
  num_kv_heads=4, head_width=128, rope_theta=1e6, norm_eps=1e-6, qk_norm=False,
  qkv_bias=True, tied_head=False, max_positions=32768,
)
fsdp, sequence, row_length, rows_per_batch = map(int, sys.argv[1:])
mesh = ahead.describe_mesh(
  "v5p:2x2x4", fsdp=fsdp, sequence=sequence, tensor=2
)
(hidden,) = axes.shardings([("row", "token", "norm")], mesh, axes.TRAIN)
settings = gradients.LossSettings(
  config=config,
  objective=tiny.OBJECTIVE,
  temperature=1.0,
  attention=choice.choose("auto", mesh, config=config, row_length=row_length),
  compute_dtype=jnp.bfloat16,
  logprob_chunk=1024,
  remat=True,
  unrolls=False,
  hidden_sharding=hidden,
)
compiled = ahead.compile_step(
  mesh,
  settings,
  tiny.OPTIMIZER,
  row_length=row_length,
  rows_per_batch=rows_per_batch,
  num_batches=4,
)
found = {}
for name, program in compiled.items():
  memory = program.memory_analysis()
  found[name] = {
    "kernels": program.as_text().count('custom_call_target="tpu_custom_call"'),
    "arguments": memory.argument_size_in_bytes,
    "reused": memory.alias_size_in_bytes,
    "outputs": memory.output_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
  }
print(json.dumps(found))
"""

_GIB = 2**30
_CHIP_GIB = 95


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed: the extra 'tpu' has the one for this jax",
)
@pytest.mark.parametrize(
  "layout",
  [(8, 1, 8192, 8), (2, 4, 32768, 2)],
  ids=["whole rows", "rows split"],
)
def test_a_step_of_qwen2_5_7b_compiles_and_fits(layout):
  """On v5p:2x2x4, 8 shares of weights by 2 of heads, with remat.

  Each chip has as many tokens where four of them share a row of 32,768.
  """
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    # There is no metadata server to ask which machine this is.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-32",
    "TPU_WORKER_HOSTNAMES": "localhost",
  }
  done = subprocess.run(
    [sys.executable, "-c", _SCRIPT, *map(str, layout)],
    env=environment,
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  found = json.loads(done.stdout.splitlines()[-1])
  # Forward, again for the backward pass, and its two halves.
  assert found["accumulate"]["kernels"] >= 3
  accumulate, update = found["accumulate"], found["update"]
  # Params, both moments and the sum of gradients, float32, of which a chip has
  # a sixteenth; norms and biases are replicated.
  state_bytes = 4 * 4 * 7.62e9 / 16
  for name, program in found.items():
    new_bytes = program["outputs"] - program["reused"]
    total = program["arguments"] + new_bytes + program["temporaries"]
    print(
      f"{name}: {total / _GIB:.2f} of {_CHIP_GIB} GiB a chip, of which "
      f"temporaries {program['temporaries'] / _GIB:.2f}"
    )
    assert total < _CHIP_GIB * _GIB, name
  assert update["arguments"] < 1.05 * state_bytes
  # The moments lie beside the micro-batch's program, which does not see them.
  beside = state_bytes / 2
  total = accumulate["arguments"] + accumulate["temporaries"] + beside
  assert total < _CHIP_GIB * _GIB
