import pathlib
import pickle

import pyarrow as pa
import pytest
from pyarrow import parquet

from dora_jax.tasks import sources

GSM8K = pathlib.Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
COLUMNS = {"question": "question", "answer": "answer"}


def load(kind, **changes):
  options = {
    "name": "",
    "params": {},
    "path": "",
    "columns": COLUMNS,
    "extract": "",
    "size": 0,
    "seed": 0,
  }
  return sources.load(kind=kind, **{**options, **changes})


def write(path, *lines):
  path.write_text("\n".join(lines), encoding="utf-8")
  return str(path)


def test_gsm8k_as_shipped():
  path = GSM8K / "train.jsonl"
  if not path.is_file():
    pytest.skip("../shared/data/gsm8k is missing")
  examples = load("jsonl", path=str(path), extract="gsm8k")
  assert len(examples) == 7473
  assert [example.answer for example in examples[:3]] == ["72", "10", "5"]
  assert examples[0].question.startswith("Natalia sold clips to 48")
  assert examples[0].worked.endswith("altogether in April and May.\n#### 72")
  # Every answer is a whole number once its commas are gone.
  assert all(e.answer.lstrip("-").isdigit() for e in examples)


def test_reasoning_gym_depends_on_the_seed_alone():
  params = {"min_word_len": 3, "max_word_len": 5}

  def generate(seed):
    return load(
      "reasoning_gym", name="spell_backward", params=params, size=6, seed=seed
    )

  examples = generate(3)
  assert len(examples) == 6
  assert examples == generate(3) != generate(4)
  assert pickle.loads(pickle.dumps(examples)) == examples
  for example in examples:
    assert example.answer[::-1] == example.question.rpartition(" ")[2]
    assert 3 <= len(example.answer) <= 5


def test_reasoning_gym_names_the_nearest():
  with pytest.raises(ValueError, match="Did you mean 'spell_backward'"):
    load("reasoning_gym", name="spell_backwards", size=1)
  with pytest.raises(ValueError, match="Did you mean 'max_word_len'"):
    load(
      "reasoning_gym",
      name="spell_backward",
      params={"max_wrd_len": 5},
      size=1,
    )
  with pytest.raises(ValueError, match=r"set config\.task\.size"):
    load("reasoning_gym", name="spell_backward", size=0)


def test_reversal_draws_different_strings():
  params = {"alphabet": "01", "min_length": 2, "max_length": 4}
  examples = load("reversal", params=params, size=14)
  questions = [example.question for example in examples]
  assert len(set(questions)) == 14
  assert {len(question) for question in questions} <= {2, 3, 4}
  assert all(e.answer == e.worked == e.question[::-1] for e in examples)
  with pytest.raises(ValueError, match=r"config\.task\.size is 15.*are 28"):
    load("reversal", params=params, size=15)


def test_sums_enumerates_all_pairs():
  examples = load("sums", params={"max_term": 2})
  assert [(e.question, e.answer) for e in examples] == [
    *(("0 + 0", "0"), ("0 + 1", "1"), ("0 + 2", "2")),
    *(("1 + 0", "1"), ("1 + 1", "2"), ("1 + 2", "3")),
    *(("2 + 0", "2"), ("2 + 1", "3"), ("2 + 2", "4")),
  ]
  with pytest.raises(ValueError, match="Did you mean 'max_term'"):
    load("sums", params={"max_terms": 2})
  with pytest.raises(ValueError, match="No example"):
    load("sums", params={"max_term": -1})


def test_parquet_equals_jsonl(tmp_path):
  rows = [{"problem": f"{i}?", "final": float(i), "level": i} for i in range(5)]
  parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
  lines = [
    f'{{"problem": "{i}?", "final": {i}.0, "level": {i}}}\n' for i in range(5)
  ]
  columns = {"question": "problem", "answer": "final"}
  from_parquet, from_jsonl = (
    load(kind, path=path, columns=columns)
    for kind, path in (
      ("parquet", str(tmp_path / "rows.parquet")),
      ("jsonl", write(tmp_path / "rows.jsonl", *lines)),
    )
  )
  assert from_parquet == from_jsonl
  path = str(tmp_path / "rows.jsonl")
  assert load("jsonl", path=path, columns=columns, size=2) == from_jsonl[:2]
  assert from_parquet[3] == sources.Example(
    question="3?", answer="3", worked="3", metadata={"level": 3}
  )


@pytest.mark.parametrize(
  ("line", "words"),
  [
    ('{"question": "1?"}', "has no column 'answer', only \\['question'\\]"),
    ('{"question": "1?", "answer": null}', "'answer' holds None"),
    ('{"question": ["1"], "answer": "1"}', "'question' holds \\['1'\\]"),
    ('{"question": "1?", "answer": true}', "'answer' holds True"),
    ('{"question": "1?", "answer": "1"}', "No answer follows '####'"),
    ('{"question": "1?", ', "is not JSON"),
    ("[1, 2]", "holds \\[1, 2\\]"),
  ],
)
def test_malformed_row_is_named(tmp_path, line, words):
  good = '{"question": "1?", "answer": "#### 1"}'
  path = write(tmp_path / "bad.jsonl", good, "", line, good)
  with pytest.raises(ValueError, match=f"bad.jsonl, line 3: .*{words}"):
    load("jsonl", path=path, extract="gsm8k")


def test_empty_and_missing_files_name_the_field(tmp_path):
  empty = write(tmp_path / "empty.jsonl", "", "")
  with pytest.raises(ValueError, match=r"empty\.jsonl.*set config\.task\.path"):
    load("jsonl", path=empty)
  with pytest.raises(FileNotFoundError, match=r"config\.task\.path"):
    load("jsonl", path=str(tmp_path / "none.jsonl"))
  with pytest.raises(ValueError, match=r"config\.task\.columns\.answer"):
    load("jsonl", path=empty, columns={"question": "question"})
  with pytest.raises(ValueError, match="Did you mean 'gsm8k'"):
    load("jsonl", path=empty, extract="gsm8")
  with pytest.raises(ValueError, match="Did you mean 'jsonl'"):
    load("json", path=empty)
