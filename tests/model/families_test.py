"""config.json: both spellings of rotary settings, and what is refused."""

import pytest

from dora_jax.model import families, rope

_LLAMA = {
  "model_type": "llama",
  "hidden_size": 64,
  "intermediate_size": 172,
  "num_hidden_layers": 5,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "vocab_size": 512,
  "max_position_embeddings": 512,
  "rms_norm_eps": 1e-05,
  "rope_theta": 10000.0,
}


def test_there_and_back(config):
  assert families.from_hf(families.to_hf(config)) == config


def test_both_generations_of_rotary_settings_are_read():
  llama3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
  }
  old = _LLAMA | {"rope_scaling": llama3}
  new = _LLAMA | {"rope_parameters": llama3 | {"rope_theta": 10000.0}}
  del new["rope_theta"]
  assert families.from_hf(old) == families.from_hf(new)
  assert families.from_hf(old).rope_scaling == rope.Llama3Scaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=32,
  )


def test_head_width_and_head_default_as_hugging_face_has_it():
  config = families.from_hf(_LLAMA)
  assert config.head_width == 8
  assert not config.tied_head


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model_type": "gemma3"}, "'gemma3'.*llama.*qwen2.*qwen3"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type 'linear'"),
    ({"rope_theta": None}, "no 'rope_theta'"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"sliding_window": 128}, "sliding_window = 128"),
    ({"use_sliding_window": True}, "use_sliding_window = True"),
    ({"layer_types": ["sliding_attention"]}, "sliding_window"),
    ({"num_attention_heads": 6}, "num_key_value_heads|num_kv_heads|head_dim"),
    ({"model_type": "qwen3"}, "no 'head_dim'"),
  ],
)
def test_refuses(changes, message):
  with pytest.raises(ValueError, match=message):
    families.from_hf(_LLAMA | changes)


def test_an_unused_window_is_no_matter():
  unused = {"use_sliding_window": False, "sliding_window": 4096}
  assert families.from_hf(_LLAMA | unused) == families.from_hf(_LLAMA)
