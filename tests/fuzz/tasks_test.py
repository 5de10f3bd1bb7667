"""Any file of rows, any reward and any text: a result, or an error by name."""

import json
import math
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers as library
from hypothesis import strategies as st

from dora_jax.tasks import (
  prompts,
  reward_worker,
  rewards,
  sources,
  templates,
  tokenizers,
)
from tests.fuzz import trying

_COLUMNS = {"question": "question", "answer": "answer"}
_JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=8,
)
_ROW = st.fixed_dictionaries(
  {},
  optional={"question": _JSON, "answer": _JSON | st.text(), "more": _JSON},
)
_LINE = st.one_of(
  _ROW.map(lambda row: json.dumps(row).encode()),
  st.builds(
    lambda q, a: json.dumps({"question": q, "answer": a}).encode(),
    st.text(),
    st.text() | st.integers() | st.floats(),
  ),
  _JSON.map(lambda value: json.dumps(value).encode()),
  st.binary(max_size=40),
  st.sampled_from([
    b'{"question": "a", "question": "b", "answer": "c"}',
    b'{"question": "\\ud800", "answer": "c"}',
    b'{"question": 1' + b"0" * 5000 + b', "answer": 1}',
    b"[" * 100_000,
    b"\xff\xfe{}",
    b"\xef\xbb\xbf{}",
    b"null",
    b"\x00" * 64,
  ]),
)  # fmt: skip


def _read(lines: list[bytes]) -> str:
  with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
    file.write(b"\n".join(lines))
    file.flush()
    try:
      examples = sources.read_file(
        file.name,
        rows=sources.jsonl_rows,
        columns=_COLUMNS,
        extract_name="",
        size=0,
      )
    except ValueError as error:
      known = ("config.task.path", ", line ")
      assert any(word in str(error) for word in known), error
      assert len(str(error)) < 1000 and str(error).isprintable(), error
      return "refused"
  for example in examples:
    assert isinstance((example.question + example.answer).encode(), bytes)
  kept = [line for line in b"\n".join(lines).split(b"\n") if line.strip()]
  assert len(examples) == len(kept)
  for example, line in zip(examples, kept, strict=True):
    question = json.loads(line)["question"]
    assert not isinstance(question, str) or question == example.question
  return "read"


@trying.amounts(few=80, many=20_000)
def test_rows_are_read_as_they_are_or_refused_by_line(amount):
  ended = trying.run("JSONL rows", st.lists(_LINE, max_size=3), _read, amount)
  assert len(ended) == 2


def _parquet(change: tuple[int, int, bytes], whole: bytes) -> str:
  place, length, inserted = change
  place %= len(whole)
  damaged = whole[:place] + inserted + whole[place + length :]
  with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
    file.write(damaged)
    file.flush()
    try:
      sources.read_file(
        file.name,
        rows=sources.parquet_rows,
        columns=_COLUMNS,
        extract_name="",
        size=0,
      )
    except ValueError as error:
      assert file.name in str(error), error
      return "refused"
  return "read"


@trying.amounts(few=50, many=3_000)
def test_a_damaged_parquet_file_is_refused_by_name(amount, tmp_path):
  import pyarrow
  from pyarrow import parquet

  path = tmp_path / "rows.parquet"
  table = pyarrow.table({"question": ["3+4", "5"], "answer": ["7", "5"]})
  parquet.write_table(table, path)
  whole = path.read_bytes()
  changes = st.tuples(st.integers(0), st.integers(0, 9), st.binary(max_size=9))
  trying.run(
    "Parquet files", changes, lambda change: _parquet(change, whole), amount
  )


class _Awkward(Exception):
  def __str__(self) -> str:
    raise ValueError("no text")


_VALUES = st.recursive(
  st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.fractions(),
    st.decimals(),
    st.complex_numbers(),
    st.floats(width=32).map(np.float32),
    st.integers(-9, 9).map(np.int64),
    st.booleans().map(np.bool_),
    st.lists(st.floats(), max_size=3).map(np.asarray),
    st.just(object()),
    st.integers(300, 400).map(lambda n: 10**n),
  ),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(
      st.just("reward") | st.text(max_size=3) | st.integers(), inner, max_size=3
    )
    | inner.map(lambda value: {"reward": value})
  ),
  max_leaves=5,
)


def _judge(value: Any) -> str:
  try:
    reward, components = rewards.check_score(value)
  except ValueError as error:
    assert len(reward_worker.describe(error)) < 1200
    assert "reward" in str(error) or "component" in str(error), error
    return "refused"
  given = value["reward"] if isinstance(value, Mapping) else value
  assert math.isclose(reward, float(given)) or reward == float(given)
  taken = np.asarray([reward, *components.values()], np.float32)
  assert np.isfinite(taken).all()
  return "taken"


@trying.amounts(few=150, many=30_000)
def test_whatever_a_reward_returns_is_a_number_or_an_error(amount):
  ended = trying.run("reward values", _VALUES, _judge, amount)
  assert len(ended) == 2
  assert "raises ValueError" in reward_worker.describe(_Awkward())


_ALPHABET = "0123456789+= é"
_ANY_TEXT = st.one_of(
  st.text(alphabet=_ALPHABET),
  st.text(),
  st.text(alphabet=st.characters(categories=["Cs", "Cc", "Cf", "Lu"])),
)


def _tokenize(text: str, each: tokenizers.HfTokenizer) -> str:
  by_characters = tokenizers.CharTokenizer(_ALPHABET)
  try:
    assert by_characters.decode(by_characters.encode(text)) == text
    ending = "taken"
  except ValueError as error:
    assert "config.tokenizer.alphabet" in str(error) and len(str(error)) < 500
    assert set(text) - set(_ALPHABET)
    ending = "refused"
  try:
    ids = each.encode(text)
  except ValueError as error:
    assert "Unicode" in str(error)
    return "refused by both"
  assert each.decode(ids) == text
  return ending


def _byte_level(folder: pathlib.Path) -> tokenizers.HfTokenizer:
  """A tokenizer of single bytes, as GPT-2's is below its merges."""
  alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
  model = library.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
  tokenizer = library.Tokenizer(model)
  tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  tokenizer.decoder = library.decoders.ByteLevel()
  tokenizer.add_special_tokens(["<end>"])
  tokenizer.save(str(folder / "tokenizer.json"))
  return tokenizers.HfTokenizer(str(folder), stop_ids=(len(alphabet),))


@trying.amounts(few=100, many=25_000)
def test_text_comes_back_or_is_refused(amount, tmp_path):
  made = _byte_level(tmp_path)
  ended = trying.run(
    "tokenizer texts", _ANY_TEXT, lambda text: _tokenize(text, made), amount
  )
  assert len(ended) == 3


def _decode(ids: list[int], each: tokenizers.HfTokenizer) -> str:
  try:
    tokenizers.CharTokenizer(_ALPHABET).decode(ids)
    each.decode(ids).encode()
  except ValueError as error:
    assert "Token id" in str(error)
    return "refused"
  return "decoded"


@trying.amounts(few=50, many=10_000)
def test_any_ids_are_decoded_or_refused(amount, tmp_path):
  made = _byte_level(tmp_path)
  ids = st.lists(st.integers(0, 15) | st.integers(), max_size=6)
  trying.run("token ids", ids, lambda drawn: _decode(drawn, made), amount)


def test_an_enormous_prompt_is_left_out_or_named():
  rows = [("x", "3+4"), ("y", "1" * 1_000_000)]
  source = [
    sources.Example(question=q, answer=a, worked=a, metadata={})
    for a, q in rows
  ]

  def make(on_long_prompt, alphabet="0123456789+"):
    return prompts.PromptTask(
      source=source,
      tokenizer=tokenizers.CharTokenizer(alphabet),
      renderer=templates.TextTemplate("{question}"),
      num_heldout=0,
      max_prompt_tokens=8,
      on_long_prompt=on_long_prompt,
      num_epochs=1,
      shuffle=False,
      seed=0,
    )

  assert make("skip").num_skipped == 1
  for arguments in (("error",), ("skip", "3+4")):
    try:
      make(*arguments)
    except ValueError as error:
      assert str(error).startswith("Prompt 1") and len(str(error)) < 400
    else:
      raise AssertionError("The prompt was taken.")
