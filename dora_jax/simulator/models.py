"""Sizes of models, as far as costs depend on them."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSize:
  """A decoder-only model.

  Attributes:
    num_params: of all weights.
    num_active: of those that one token uses.
    num_expert_params: of all routed experts; 0 where the model is dense.
    expert_share: of a layer's routed experts, those that one token uses.
    kv_values: numbers of KV that one token leaves in all layers.
    attention_flops: to attend to one earlier token, in all layers.
  """

  num_params: float
  num_active: float
  num_expert_params: float = 0.0
  expert_share: float = 0.0
  kv_values: int
  attention_flops: int


def _dense(
  *,
  num_params: float,
  num_layers: int,
  num_heads: int,
  num_kv_heads: int,
  head_width: int,
) -> ModelSize:
  """KV is a key and a value a head; attention two products a query head."""
  return ModelSize(
    num_params=num_params,
    num_active=num_params,
    kv_values=2 * num_layers * num_kv_heads * head_width,
    attention_flops=4 * num_layers * num_heads * head_width,
  )


# Dense: config.json and parameter counts of the models' pages on
# huggingface.co. LongCat-Flash: arXiv 2509.01322, section 2: 28 layers of two
# latent attentions (512 + 64 numbers of KV, 64 heads), 512 routed experts of
# which 12 are chosen, 8 of them real on average; 27B of 560B are active.
# tiny: the benchmark's model, 1 layer of width 16.
MODELS: dict[str, ModelSize] = {
  "qwen2.5-0.5b": _dense(
    num_params=0.494e9,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_width=64,
  ),
  "qwen2.5-7b": _dense(
    num_params=7.62e9,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_width=128,
  ),
  "qwen2.5-32b": _dense(
    num_params=32.76e9,
    num_layers=64,
    num_heads=40,
    num_kv_heads=8,
    head_width=128,
  ),
  "qwen2.5-72b": _dense(
    num_params=72.7e9,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_width=128,
  ),
  "longcat-flash": ModelSize(
    num_params=560e9,
    num_active=27e9,
    num_expert_params=541e9,
    expert_share=8 / 512,
    kv_values=28 * 2 * (512 + 64),
    attention_flops=28 * 2 * 64 * 2 * (512 + 64 + 512),
  ),
  "tiny": _dense(
    num_params=3e3, num_layers=1, num_heads=1, num_kv_heads=1, head_width=16
  ),
}


def find(name: str) -> ModelSize:
  """The model of this name.

  Raises:
    ValueError: there is none.
  """
  if name not in MODELS:
    raise ValueError(
      f"config.model.name is {name!r} but must be one of "
      f"{', '.join(map(repr, MODELS))}."
    )
  return MODELS[name]
