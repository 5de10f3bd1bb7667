"""metrics.jsonl stays strict JSON through NaN, crashes and resumption."""

import json
import math
import pathlib

import numpy as np
import pytest

from dora_jax import metrics


def _lines(folder: pathlib.Path) -> list[dict]:
  def refuse(word):
    raise AssertionError(f"{word} is not JSON")

  text = (folder / "metrics.jsonl").read_text()
  return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_each_write_is_one_strict_json_line(tmp_path):
  writer = metrics.MetricsWriter(tmp_path)
  writer.write(0, {"train/loss": np.float32(0.5), "train/lag_count/0": 3})
  writer.write(1, {"train/loss": math.nan, "eval/accuracy": -math.inf})
  # Readable before close: a run that dies leaves its curves.
  first, second = _lines(tmp_path)
  writer.close()
  assert first.pop("time_s") <= second.pop("time_s")
  assert first == {"step": 0, "train/loss": 0.5, "train/lag_count/0": 3.0}
  assert second == {"step": 1, "train/loss": None, "eval/accuracy": None}
  assert writer.num_nonfinite == 2
  assert list(tmp_path.glob("events.out.tfevents.*"))


def test_resumed_duplicates_are_marked_and_nothing_is_rewritten(tmp_path):
  first = metrics.MetricsWriter(tmp_path)
  for step in range(3):
    first.write(step, {"train/loss": float(step)})
  first.close()
  before = (tmp_path / "metrics.jsonl").read_bytes()
  second = metrics.MetricsWriter(tmp_path)
  for step in (1, 2, 3):
    second.write(step, {"train/loss": 7.0})
  second.close()
  assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)
  assert [(r["step"], "resumed" in r) for r in _lines(tmp_path)] == [
    (0, False),
    (1, False),
    (2, False),
    (1, True),
    (2, True),
    (3, False),
  ]


def test_a_line_torn_by_a_crash_is_cut_off(tmp_path):
  whole = '{"step": 4, "time_s": 1.0, "train/loss": 1.0}\n'
  path = tmp_path / "metrics.jsonl"
  path.write_text(whole + '{"step": 5, "time_s": 2.0, "tra')
  writer = metrics.MetricsWriter(tmp_path)
  writer.write(5, {"train/loss": 2.0})
  writer.close()
  assert path.read_text().startswith(whole)
  assert [(r["step"], "resumed" in r) for r in _lines(tmp_path)] == [
    (4, False),
    (5, False),
  ]


@pytest.mark.parametrize(
  "name", ["loss", "Train/loss", "train/", "a/b/c/d", "a b/c"]
)
def test_a_name_without_its_stage_is_refused(tmp_path, name):
  writer = metrics.MetricsWriter(tmp_path)
  with pytest.raises(ValueError, match="stage/name_unit"):
    writer.write(0, {name: 1.0})
  writer.close()
