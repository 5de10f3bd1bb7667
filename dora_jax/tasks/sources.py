"""Where examples come from: generators, files, and sums of small numbers."""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from dora_jax.tasks import lookup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
  """One problem as its source gives it, not yet a prompt.

  Attributes:
    question: what is asked.
    answer: the reference answer; empty where the source has none and judges
      by its own rule.
    worked: an answer as one would write it out, for a supervised cold start.
    metadata: what else the source says; picklable, for rewards.
  """

  question: str
  answer: str
  worked: str
  metadata: Mapping[str, Any]


def load(
  *,
  kind: str,
  name: str,
  params: Mapping[str, Any],
  path: str,
  columns: Mapping[str, str],
  extract: str,
  size: int,
  seed: int,
) -> list[Example]:
  """The examples that config.task describes; each kind takes what it needs.

  Args:
    kind: "reasoning_gym", "jsonl", "parquet", "sums" or "reversal".
    name: the generator of reasoning_gym.
    params: parameters of the generator, of `sums` or of `reversal`.
    path: the file.
    columns: from question, answer and (optional) worked to the file's columns;
      of reasoning_gym, from question to a field of its entries or metadata.
    extract: named function that takes the answer out of its column; empty
      takes the column as it is.
    size: number of examples to generate; of a file, how many to read at most,
      where 0 reads all.
    seed: of the generator.
  """
  if kind == "reasoning_gym":
    return generate(name, params=params, columns=columns, size=size, seed=seed)
  if kind == "sums":
    lookup.check_keywords(
      sums, params, num_positional=0, field="config.task.params"
    )
    return sums(**params)
  if kind == "reversal":
    lookup.check_keywords(
      reversal, params, num_positional=0, field="config.task.params"
    )
    return reversal(**params, size=size, seed=seed)
  kinds = {"jsonl": jsonl_rows, "parquet": parquet_rows}
  lookup.check_name(
    kind,
    ("reasoning_gym", "reversal", "sums", *kinds),
    what="source",
    field="config.task.source",
  )
  return read_file(
    path, rows=kinds[kind], columns=columns, extract_name=extract, size=size
  )


def sums(*, max_term: int) -> list[Example]:
  """Every sum of two terms from 0 to max_term, in order: "3 + 4" is "7"."""
  terms = range(max_term + 1)
  examples = [
    Example(
      question=f"{a} + {b}", answer=str(a + b), worked=str(a + b), metadata={}
    )
    for a in terms
    for b in terms
  ]
  return _refuse_empty(
    examples, f"sums with max_term {max_term}", "config.task.params.max_term"
  )


def reversal(
  *, alphabet: str, min_length: int, max_length: int, size: int, seed: int
) -> list[Example]:
  """Random strings to be written backward: "472" is "274"; none comes twice.

  A string's length, hence that of its answer, is drawn evenly.

  Raises:
    ValueError: there are not `size` different strings of these lengths.
  """
  num_strings = sum(
    len(alphabet) ** length for length in range(min_length, max_length + 1)
  )
  # Drawing without repeats slows down as the last ones are looked for.
  if 2 * size > num_strings:
    raise ValueError(
      f"config.task.size is {size}, but of {len(alphabet)} characters there "
      f"are {num_strings} strings of {min_length} to {max_length}: at most "
      "half as many can be asked for."
    )
  rng = np.random.default_rng(seed)
  drawn: dict[str, None] = {}
  while len(drawn) < size:
    length = rng.integers(min_length, max_length + 1)
    drawn["".join(rng.choice(list(alphabet), length))] = None
  return _refuse_empty(
    [
      Example(question=text, answer=text[::-1], worked=text[::-1], metadata={})
      for text in drawn
    ],
    f"reversal of size {size}",
    "config.task.size",
  )


def generate(
  name: str,
  *,
  params: Mapping[str, Any],
  columns: Mapping[str, str],
  size: int,
  seed: int,
) -> list[Example]:
  """Examples of a reasoning-gym generator, by its name.

  The metadata holds the generator's name, its parameters and the entry, with
  which the reward `reasoning_gym` calls the generator's own score_answer.
  Source: https://github.com/open-thought/reasoning-gym.
  """
  # Imported here because it takes seconds, which other tasks need not wait.
  import reasoning_gym
  from reasoning_gym import factory

  lookup.check_name(
    name, factory.DATASETS, what="generator", field="config.task.name"
  )
  _, config_class = factory.DATASETS[name]
  known = [field.name for field in dataclasses.fields(config_class)]
  for key in params:
    lookup.check_name(
      key,
      set(known) - {"size", "seed"},
      what=f"parameter of {name}",
      field="config.task.params",
    )
  if size < 1:
    return _refuse_empty([], f"{name} of size {size}", "config.task.size")
  parameters = {**params, "size": size, "seed": seed}
  dataset = reasoning_gym.create_dataset(name, **parameters)
  return [
    _generated(name, parameters, dataset[index], columns["question"])
    for index in range(size)
  ]


def _generated(
  name: str,
  parameters: Mapping[str, Any],
  entry: dict[str, Any],
  question_column: str,
) -> Example:
  # What a generator asks in a sentence stands in its metadata by itself, which
  # a small model, that has to learn every token, can be asked instead.
  asked = {**entry["metadata"], "question": entry["question"]}
  lookup.check_name(
    question_column,
    asked,
    what=f"column of {name}",
    field="config.task.columns.question",
  )
  # Some generators judge by rule and keep no reference answer.
  answer = "" if entry["answer"] is None else str(entry["answer"])
  return Example(
    question=str(asked[question_column]),
    answer=answer,
    worked=answer,
    metadata={"generator": name, "parameters": parameters, "entry": entry},
  )


def read_file(
  path: str,
  *,
  rows: Callable[[pathlib.Path], Iterable[tuple[str, Any]]],
  columns: Mapping[str, str],
  extract_name: str,
  size: int,
) -> list[Example]:
  """Examples of a file, one a row, all in memory.

  Args:
    path: the file.
    rows: reads it as pairs (where it stands, row).
    columns: from question, answer and (optional) worked to the file's columns.
      Without `worked`, the answer's column as it is serves as that.
    extract_name: name of the function that takes the answer out of its column;
      empty takes the column as it is.
    size: how many rows to read at most; 0 reads all.

  Raises:
    ValueError: a row lacks a column, or holds what is no text; none is there.
  """
  _check_columns(columns)
  extract = lookup.find_function(
    extract_name or "as_is",
    EXTRACTORS,
    what="answer extraction",
    field="config.task.extract",
  )
  if not pathlib.Path(path).is_file():
    raise FileNotFoundError(
      f"There is no file {path!r}: set config.task.path or heldout_path."
    )
  examples = [
    _parse_row(row, where=where, columns=columns, extract=extract)
    for where, row in itertools.islice(rows(pathlib.Path(path)), size or None)
  ]
  return _refuse_empty(examples, str(path), "config.task.path")


def _check_columns(columns: Mapping[str, str]) -> None:
  for key in columns:
    lookup.check_name(
      key,
      ("question", "answer", "worked"),
      what="column role",
      field="config.task.columns",
    )
  for key in ("question", "answer"):
    if key not in columns:
      raise ValueError(
        f"The column of the {key} is missing: set config.task.columns.{key}."
      )


def _parse_row(
  row: Any,
  *,
  where: str,
  columns: Mapping[str, str],
  extract: Callable[[str], str],
) -> Example:
  if not isinstance(row, dict):
    raise ValueError(
      f"{where}: holds {lookup.shorten(row)}, but a row must map names to"
      " values."
    )
  texts = {}
  for role, column in columns.items():
    if column not in row:
      raise ValueError(
        f"{where}: has no column {column!r}, only"
        f" {lookup.shorten(sorted(row))}: correct the row or"
        f" config.task.columns.{role}."
      )
    texts[role] = _text(row[column], where=where, column=column)
  try:
    answer = extract(texts["answer"])
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from error
  return Example(
    question=texts["question"],
    answer=answer,
    worked=texts.get("worked", texts["answer"]),
    metadata={k: v for k, v in row.items() if k not in columns.values()},
  )


def _text(value: Any, *, where: str, column: str) -> str:
  """A column's value as text; numbers as one writes them (8.0 is "8")."""
  if isinstance(value, float) and value.is_integer():
    return str(int(value))
  is_finite = not isinstance(value, float) or math.isfinite(value)
  is_known = isinstance(value, str | int | float) and is_finite
  if isinstance(value, bool) or not is_known:
    raise ValueError(
      f"{where}: column {column!r} holds {lookup.shorten(value)}, but it must"
      " hold text or a finite number."
    )
  text = str(value)
  try:
    # JSON can spell half of a character, which no tokenizer takes.
    text.encode("utf-8")
  except UnicodeEncodeError as error:
    raise ValueError(
      f"{where}: column {column!r} holds {lookup.shorten(text)}, which is no"
      f" Unicode text ({error.reason} at character {error.start})."
    ) from error
  return text


def jsonl_rows(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
  """The objects of a file with one JSON object a line; blank lines are none."""
  # By bytes, so that a line that is no text can be named too.
  with path.open("rb") as lines:
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      try:
        row = json.loads(
          line.decode("utf-8"), object_pairs_hook=_without_repeats
        )
      # Not only of JSON: of UTF-8 too, and of numbers of too many digits; what
      # is nested too deeply is the last.
      except (ValueError, RecursionError) as error:
        raise ValueError(
          f"{path}, line {number}: is not JSON that can be read ({error}):"
          f" {lookup.shorten(line)}: correct or remove the line, or set"
          " config.task.path to another file."
        ) from error
      yield f"{path}, line {number}", row


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """An object, in which JSON would let the last of equal names win."""
  made = dict(pairs)
  if len(made) < len(pairs):
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    raise ValueError(f"the name {lookup.shorten(twice)} stands there twice")
  return made


def parquet_rows(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
  """The rows of a Parquet file, read by batches."""
  number = 0
  try:
    with parquet.ParquetFile(path) as file:
      for batch in file.iter_batches():
        for row in batch.to_pylist():
          number += 1
          yield f"{path}, row {number}", row
  # Of the file; what its reader raises of a row is raised outside of here.
  except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
    raise ValueError(
      f"{path}, after row {number}: is no whole Parquet file ({error}): fetch"
      " it again, or set config.task.path to another file."
    ) from error


def _as_is(answer: str) -> str:
  return answer


def _after_hashes(answer: str) -> str:
  """The final answer of GSM8K: what follows "####", without commas."""
  _, mark, final = answer.rpartition("####")
  if not mark or not final.strip():
    raise ValueError(
      f"No answer follows '####' in {answer[-80:]!r}: correct the row or"
      " config.task.extract."
    )
  return final.strip().replace(",", "")


EXTRACTORS: Mapping[str, Callable[[str], str]] = {
  "as_is": _as_is,
  "gsm8k": _after_hashes,
}


def _refuse_empty(
  examples: list[Example], what: str, field: str
) -> list[Example]:
  if not examples:
    raise ValueError(
      f"No example comes from {what}, one at least must: set {field}."
    )
  return examples
