"""Any JSON in a file that is read back: a result, or an error by its name."""

import json
import pathlib
import tempfile
import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from dora_jax import checkpoint, metrics
from dora_jax.coordinator import events as ev
from dora_jax.model import families, huggingface
from dora_jax.runtime import record
from dora_jax.tasks import tokenizers
from tests.fuzz import trying

_HF = {
  "model_type": "llama",
  "vocab_size": 16,
  "hidden_size": 8,
  "intermediate_size": 16,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "head_dim": 4,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0,
  "rope_scaling": None,
  "rope_parameters": None,
  "max_position_embeddings": 64,
  "tie_word_embeddings": True,
  "eos_token_id": 1,
  "layer_types": None,
}
_VALUES = st.one_of(
  st.none(),
  st.booleans(),
  st.integers(-2, 70),
  st.integers(),
  st.floats(),
  st.text(max_size=5),
  st.lists(st.integers(0, 3) | st.text(max_size=3), max_size=3),
  st.dictionaries(
    st.sampled_from(["rope_type", "rope_theta", "factor", "type", "x"]),
    st.integers(-1, 9) | st.floats() | st.sampled_from(["llama3", "yarn"]),
    max_size=3,
  ),
  st.sampled_from([10**9, 2**31, 10**400, 1e308, "qwen3", "qwen2", "gpt2"]),
)
_CHANGES = st.lists(
  st.tuples(st.sampled_from(sorted(_HF)), _VALUES), min_size=1, max_size=3
)


def _model(changes: list[tuple[str, Any]]) -> str:
  hf = {**_HF, **dict(changes)}
  try:
    config = families.from_hf(hf)
  except ValueError as error:
    known = ("config.json has", "in the model's config")
    assert any(words in str(error) for words in known), error
    assert len(str(error)) < 600
    return "refused"
  assert config.num_heads % config.num_kv_heads == 0
  assert config.num_layers == hf["num_hidden_layers"]
  assert np.isfinite(config.rope_theta) and config.head_width >= 1
  return "taken"


@trying.amounts(few=100, many=15_000)
def test_a_models_config_is_taken_or_refused_by_its_key(amount):
  ended = trying.run("models' config.json", _CHANGES, _model, amount)
  assert len(ended) == 2


def _text(content: bytes) -> str:
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
      (folder / file).write_bytes(content)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "model.safetensors.index.json").write_bytes(content)
    config = families.from_hf(_HF)
    ended = set()
    for read in (
      lambda: huggingface.load_config(folder),
      lambda: tokenizers.HfTokenizer(name),
      lambda: tokenizers.HfTokenizer(name, stop_ids=(1,)),
      lambda: huggingface.load_params(folder, config, dtype=jnp.float32),
    ):
      try:
        read()
        ended.add("read")
      except (ValueError, FileNotFoundError) as error:
        assert name in str(error) or "config.json" in str(error), error
        ended.add("refused")
  return " or ".join(sorted(ended))


_CONTENTS = st.one_of(
  st.binary(max_size=60),
  st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
      st.sampled_from(["weight_map", "eos_token", "eos_token_id", "model"]),
      inner,
      max_size=3,
    ),
    max_leaves=5,
  ).map(lambda value: json.dumps(value).encode()),
  st.sampled_from([
    b"[" * 50_000,
    b'{"weight_map": {"a": "../../etc/passwd"}}',
    b'{"weight_map": {"a": "x.bin"}}',
    b'{"eos_token": {"text": "x"}}',
    b"\xff" * 9,
    b"\xff\xff\xff\xff\xff\xff\xff\x7f{}",
  ]),
)  # fmt: skip


@trying.amounts(few=15, many=2_000)
def test_a_models_folder_of_anything_is_refused_by_its_file(amount):
  ended = trying.run("models' folders", _CONTENTS, _text, amount)
  assert ended["refused"] > 0


def _written(path: pathlib.Path) -> list[Any]:
  events = [
    ev.StepDone(version=1),
    ev.Finished(generator_id=0, group_id=3, member=1, version=0, num_tokens=7),
    ev.Cancelled(generator_id=0, cancelled=((3, 1, 4),)),
    ev.Tick(),
  ]
  writer = record.EventWriter(path, {"seed": 1})
  for number, event in enumerate(events):
    writer.write(event, float(number))
  writer.close()
  return events


def _damaged(change: tuple[int, int, bytes, bool], text: bytes) -> str:
  place, length, inserted, is_packed = change
  data = text if is_packed else zlib.decompress(text, wbits=31)
  place %= len(data)
  data = data[:place] + inserted + data[place + length :]
  if not is_packed:
    packer = zlib.compressobj(wbits=31)
    data = packer.compress(data) + packer.flush()
  with tempfile.TemporaryDirectory() as name:
    path = pathlib.Path(name) / record.FILE_NAME
    path.write_bytes(data)
    try:
      _, events = record.read_events(path)
      for event, _ in events:
        assert isinstance(event, tuple(record._CLASSES.values()))
    except ValueError as error:
      assert name in str(error) and len(str(error)) < 2000, error
      return "refused"
  return "read"


@trying.amounts(few=80, many=10_000)
def test_a_damaged_record_of_events_is_refused_by_its_line(amount, tmp_path):
  _written(tmp_path / record.FILE_NAME)
  text = (tmp_path / record.FILE_NAME).read_bytes()
  changes = st.tuples(
    st.integers(0), st.integers(0, 9), st.binary(max_size=9), st.booleans()
  )
  ended = trying.run(
    "records of events", changes, lambda change: _damaged(change, text), amount
  )
  assert len(ended) == 2


_EXTRAS = {"version": 3, "coordinator": {"ready": [[0, 1.5], None]}, "é": True}


def _extras(
  folder: pathlib.Path, change: tuple[int, int, bytes], text: bytes
) -> str:
  place, length, inserted = change
  place %= len(text)
  path = folder / "3/extras/metadata"
  path.write_bytes(text[:place] + inserted + text[place + length :])
  try:
    # Spaces may change, numbers may not.
    assert checkpoint.read_extras(folder, None) == _EXTRAS
  except ValueError as error:
    assert "metadata" not in str(error) and str(folder) in str(error), error
    assert len(str(error)) < 600
    return "refused"
  return "read"


@trying.amounts(few=60, many=6_000)
def test_a_checkpoints_json_is_what_was_saved_or_refused(amount, tmp_path):
  checkpoints = checkpoint.Checkpoints(tmp_path, max_to_keep=1)
  checkpoints.save(3, {"x": jnp.zeros(2)}, _EXTRAS)
  checkpoints.close()
  text = (tmp_path / "3/extras/metadata").read_bytes()
  changes = st.one_of(
    st.tuples(st.integers(0), st.integers(0, 9), st.binary(max_size=9)),
    st.tuples(st.integers(0), st.just(0), st.just(b" ")),
    st.tuples(st.just(0), st.just(len(text)), _CONTENTS),
  )
  ended = trying.run(
    "checkpoints' JSON",
    changes,
    lambda change: _extras(tmp_path, change, text),
    amount,
  )
  assert len(ended) == 2


def _metrics(lines: list[bytes]) -> str:
  with tempfile.TemporaryDirectory() as name:
    path = pathlib.Path(name) / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
      last = metrics.mend(path)
    except ValueError as error:
      assert name in str(error), error
      return "refused"
    assert last >= -1
  return "read"


@trying.amounts(few=50, many=5_000)
def test_damaged_metrics_are_refused_by_their_line(amount):
  line = st.one_of(
    st.integers(0, 9).map(lambda step: json.dumps({"step": step}).encode()),
    st.binary(max_size=20),
    _VALUES.map(lambda value: json.dumps({"step": value}).encode()),
  )
  trying.run("metrics.jsonl", st.lists(line, max_size=4), _metrics, amount)
