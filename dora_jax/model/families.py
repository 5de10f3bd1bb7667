"""Hugging Face's config.json to ModelConfig and back, family by family."""

import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from dora_jax.model import rope, transformer

ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
}

# A layer is many arrays, and each is looked for by its name.
_MOST_LAYERS = 10_000
_MOST_OF_ANYTHING = 2**31 - 1
_LLAMA3_KEYS = {
  "factor": "factor",
  "low_freq_factor": "low_freq_factor",
  "high_freq_factor": "high_freq_factor",
  "original_max_positions": "original_max_position_embeddings",
}


def from_hf(hf: Mapping[str, Any]) -> transformer.ModelConfig:
  """The ModelConfig of a parsed config.json; refuses what it cannot honour."""
  model_type = _required(hf, "model_type")
  if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
    raise ValueError(
      f"config.json has model_type {model_type!r} but the families known here "
      f"are {sorted(ARCHITECTURES)}: choose another model in config.model."
    )
  _refuse_variants(hf)
  theta, scaling = _read_rope(hf)
  num_heads = _count(hf, "num_attention_heads")
  return transformer.ModelConfig(
    vocab_size=_count(hf, "vocab_size"),
    width=_count(hf, "hidden_size"),
    mlp_width=_count(hf, "intermediate_size"),
    num_layers=_count(hf, "num_hidden_layers", most=_MOST_LAYERS),
    num_heads=num_heads,
    num_kv_heads=_read_kv_heads(hf, num_heads),
    head_width=_read_head_width(hf, model_type),
    rope_theta=theta,
    norm_eps=_size(hf, "rms_norm_eps"),
    qk_norm=model_type == "qwen3",
    qkv_bias=model_type == "qwen2",
    # Left out, it means untied in all three families.
    tied_head=bool(hf.get("tie_word_embeddings", False)),
    max_positions=_count(hf, "max_position_embeddings"),
    rope_scaling=scaling,
  )


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


def _count(
  hf: Mapping[str, Any], key: str, *, most: int = _MOST_OF_ANYTHING
) -> int:
  """A number of things; of a size that an array could have."""
  value = _required(hf, key)
  is_int = isinstance(value, int) and not isinstance(value, bool)
  if not is_int or not 1 <= value <= most:
    raise _wrong(key, value, f"a whole number from 1 to {most}")
  return value


def _size(hf: Mapping[str, Any], key: str) -> float:
  """A finite number above 0."""
  value = _required(hf, key)
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  # Compared with a float's largest, so that no conversion can overflow.
  if not is_number or not 0 < value <= sys.float_info.max:
    raise _wrong(key, value, "a finite number above 0")
  return float(value)


def _wrong(key: str, value: Any, needed: str) -> ValueError:
  return ValueError(
    f"config.json has {key} = {reprlib.repr(value)} but it must be {needed}: "
    "correct it, or choose another model in config.model."
  )


def _read_kv_heads(hf: Mapping[str, Any], num_heads: int) -> int:
  num_kv_heads = _count(hf, "num_key_value_heads")
  if num_heads % num_kv_heads:
    raise _wrong(
      "num_key_value_heads",
      num_kv_heads,
      f"a divisor of num_attention_heads, {num_heads}",
    )
  return num_kv_heads


def _read_head_width(hf: Mapping[str, Any], model_type: str) -> int:
  # Qwen3 chooses its head width freely; elsewhere it is the width's share.
  if hf.get("head_dim") is not None or model_type == "qwen3":
    return _count(hf, "head_dim")
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
  for key in ("rope_scaling", "rope_parameters"):
    found = hf.get(key) or {}
    if not isinstance(found, Mapping):
      raise _wrong(key, found, "an object")
    settings |= found
  rope_type = settings.get("rope_type", settings.get("type", "default"))
  theta = _size(settings, "rope_theta")
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
  low, high = (_size(settings, f"{e}_freq_factor") for e in ("low", "high"))
  if low >= high:
    raise _wrong("low_freq_factor", low, f"below high_freq_factor, {high}")
  return theta, rope.Llama3Scaling(
    factor=_size(settings, "factor"),
    low_freq_factor=low,
    high_freq_factor=high,
    original_max_positions=_count(settings, "original_max_position_embeddings"),
  )


def _refuse_variants(hf: Mapping[str, Any]) -> None:
  """Raises on settings that would change the forward pass."""
  if "auto_map" in hf:
    raise ValueError(
      f"config.json has auto_map = {reprlib.repr(hf['auto_map'])}: the model "
      "is defined by code of its own, which is never run here. Choose another "
      "model in config.model."
    )
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
  layer_types = hf.get("layer_types") or []
  if not isinstance(layer_types, list):
    raise _wrong("layer_types", layer_types, "a list")
  sliding = "sliding_attention" in layer_types
  if windowed or sliding:
    raise ValueError(
      f"config.json has sliding_window = {hf.get('sliding_window')} in use but "
      "only full attention is supported: choose another model in config.model."
    )
