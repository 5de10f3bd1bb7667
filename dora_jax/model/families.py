"""Hugging Face's config.json to ModelConfig and back, family by family."""

from collections.abc import Mapping
from typing import Any

from dora_jax.model import rope, transformer

ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
}

_LLAMA3_KEYS = {
  "factor": "factor",
  "low_freq_factor": "low_freq_factor",
  "high_freq_factor": "high_freq_factor",
  "original_max_positions": "original_max_position_embeddings",
}


def from_hf(hf: Mapping[str, Any]) -> transformer.ModelConfig:
  """The ModelConfig of a parsed config.json; refuses what it cannot honour."""
  model_type = _required(hf, "model_type")
  if model_type not in ARCHITECTURES:
    raise ValueError(
      f"config.json has model_type {model_type!r} but the families known here "
      f"are {sorted(ARCHITECTURES)}: choose another model in config.model."
    )
  _refuse_variants(hf)
  theta, scaling = _read_rope(hf)
  num_heads = _required(hf, "num_attention_heads")
  return transformer.ModelConfig(
    vocab_size=_required(hf, "vocab_size"),
    width=_required(hf, "hidden_size"),
    mlp_width=_required(hf, "intermediate_size"),
    num_layers=_required(hf, "num_hidden_layers"),
    num_heads=num_heads,
    num_kv_heads=_required(hf, "num_key_value_heads"),
    head_width=_read_head_width(hf, model_type),
    rope_theta=theta,
    norm_eps=float(_required(hf, "rms_norm_eps")),
    qk_norm=model_type == "qwen3",
    qkv_bias=model_type == "qwen2",
    # Left out, it means untied in all three families.
    tied_head=bool(hf.get("tie_word_embeddings", False)),
    max_positions=_required(hf, "max_position_embeddings"),
    rope_scaling=scaling,
  )


def stop_ids(hf: Mapping[str, Any]) -> tuple[int, ...]:
  """The token ids that end a completion: eos_token_id is an int or a list."""
  stop = _required(hf, "eos_token_id")
  return (stop,) if isinstance(stop, int) else tuple(stop)


def to_hf(config: transformer.ModelConfig) -> dict[str, Any]:
  """A config.json of the family that has the config's variants.

  Rotary settings are written as transformers 4 wrote them, which 5 reads too.
  """
  model_type = _family(config)
  hf = {
    "architectures": [ARCHITECTURES[model_type]],
    "model_type": model_type,
    "vocab_size": config.vocab_size,
    "hidden_size": config.width,
    "intermediate_size": config.mlp_width,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_width,
    "hidden_act": "silu",
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_theta,
    "tie_word_embeddings": config.tied_head,
    "max_position_embeddings": config.max_positions,
  }
  scaling = config.rope_scaling
  if scaling is not None:
    keys = {theirs: getattr(scaling, o) for o, theirs in _LLAMA3_KEYS.items()}
    hf["rope_scaling"] = {"rope_type": "llama3", **keys}
  return hf


def _family(config: transformer.ModelConfig) -> str:
  if config.qk_norm and config.qkv_bias:
    raise ValueError(
      "qk_norm and qkv_bias are both set but no known family has both: unset "
      "one in the model's config to write a Hugging Face checkpoint."
    )
  if config.qk_norm:
    return "qwen3"
  return "qwen2" if config.qkv_bias else "llama"


def _required(hf: Mapping[str, Any], key: str) -> Any:
  if hf.get(key) is None:
    raise ValueError(f"config.json has no {key!r}, which is needed: add it.")
  return hf[key]


def _read_head_width(hf: Mapping[str, Any], model_type: str) -> int:
  # Qwen3 chooses its head width freely; elsewhere it is the width's share.
  if hf.get("head_dim") is not None or model_type == "qwen3":
    return _required(hf, "head_dim")
  width, num_heads = hf["hidden_size"], hf["num_attention_heads"]
  if width % num_heads:
    raise ValueError(
      f"config.json has hidden_size {width}, which num_attention_heads "
      f"{num_heads} does not divide, and no head_dim: add head_dim."
    )
  return width // num_heads


def _read_rope(
  hf: Mapping[str, Any],
) -> tuple[float, rope.Llama3Scaling | None]:
  """Base and stretching; transformers 4 and 5 keep them in different keys."""
  # Old files say rope_theta and rope_scaling, new ones rope_parameters.
  settings = {"rope_theta": hf.get("rope_theta")}
  settings |= hf.get("rope_scaling") or {}
  settings |= hf.get("rope_parameters") or {}
  rope_type = settings.get("rope_type", settings.get("type", "default"))
  theta = float(_required(settings, "rope_theta"))
  if settings.get("partial_rotary_factor", 1.0) != 1.0:
    raise ValueError(
      "config.json has partial_rotary_factor "
      f"{settings['partial_rotary_factor']} but whole heads are rotated here: "
      "choose another model in config.model."
    )
  if rope_type == "default":
    return theta, None
  if rope_type != "llama3":
    raise ValueError(
      f"config.json has rope_type {rope_type!r} but 'default' and 'llama3' are "
      "what is known here: choose another model in config.model."
    )
  values = {o: _required(settings, key) for o, key in _LLAMA3_KEYS.items()}
  return theta, rope.Llama3Scaling(**values)


def _refuse_variants(hf: Mapping[str, Any]) -> None:
  """Raises on settings that would change the forward pass."""
  # Left out, each of these means the value needed here.
  needed = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "pretraining_tp": 1,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
  }
  for key, value in needed.items():
    if key in hf and hf[key] != value:
      raise ValueError(
        f"config.json has {key} = {hf[key]!r} but only {value!r} is supported: "
        "choose another model in config.model."
      )
  # Qwen's files name a window that use_sliding_window leaves unused.
  windowed = "use_sliding_window" not in hf and hf.get("sliding_window")
  sliding = "sliding_attention" in (hf.get("layer_types") or ())
  if windowed or sliding:
    raise ValueError(
      f"config.json has sliding_window = {hf.get('sliding_window')} in use but "
      "only full attention is supported: choose another model in config.model."
    )
