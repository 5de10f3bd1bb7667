"""Models whose generation is measured, with random weights."""

from dora_jax.model import transformer

_QWEN3 = {
  "rope_theta": 1e4,
  "norm_eps": 1e-6,
  "qk_norm": True,
  "qkv_bias": False,
  "tied_head": False,
  "max_positions": 4096,
}

# 1.1 million parameters.
SMALL = transformer.ModelConfig(
  vocab_size=512,
  width=128,
  mlp_width=512,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_width=32,
  **_QWEN3,
)

# 29 million.
MIDDLE = transformer.ModelConfig(
  vocab_size=4096,
  width=512,
  mlp_width=1536,
  num_layers=8,
  num_heads=8,
  num_kv_heads=4,
  head_width=64,
  **_QWEN3,
)

# SmolLM2-135M's.
SMOLLM2 = transformer.ModelConfig(
  vocab_size=49152,
  width=576,
  mlp_width=1536,
  num_layers=30,
  num_heads=9,
  num_kv_heads=3,
  head_width=64,
  **(_QWEN3 | {"qk_norm": False, "tied_head": True, "rope_theta": 1e5}),
)

BY_NAME = {"1.1M": SMALL, "29M": MIDDLE, "135M": SMOLLM2}
