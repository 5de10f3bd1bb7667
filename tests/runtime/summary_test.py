"""summary.json is strict JSON, and no promise breaks in silence."""

import json
import math

import jax
import numpy as np
import pytest

from dora_jax.runtime import summary

_KEPT = {"mixed": 0, "dropped": 0, "lag_max": 2, "versions_alive_max": 3}


def test_the_summary_is_a_flat_map_with_its_origin(tmp_path):
  values = {"steps": 3, "seconds": np.float32(1.5), "accuracy_before": math.nan}
  summary.write_summary(tmp_path / "run", values, command="make quickstart")
  (path,) = (tmp_path / "run").iterdir()
  assert path.name == "summary.json"
  record = json.loads(path.read_text(), parse_constant=pytest.fail)
  machine = record.pop("machine")
  commit = record.pop("commit")
  assert record == {
    "steps": 3,
    "seconds": 1.5,
    "accuracy_before": None,
    "command": "make quickstart",
  }
  assert machine["num_devices"] == 8 and machine["jax"] == jax.__version__
  assert machine["cores"] >= 1 and machine["memory_gib"] > 0
  assert commit == "unknown" or len(commit.removesuffix("-dirty")) == 40


def test_the_closing_table_says_what_was_measured():
  table = summary.closing_table(
    _KEPT | {"accuracy_before": 0.125, "accuracy_after": 0.75},
    lag_counts={1: 3, 0: 1},
    dropped_by_reason={"score failed": 2},
  )
  assert [line.split("  ")[-1].strip() for line in table.splitlines()] == [
    *("12.5%", "75.0%", "3", "2 versions", "0", "0"),
    *("25.0% (1)", "75.0% (3)", "2"),
  ]
  assert "time" not in table


@pytest.mark.parametrize(
  ("changed", "broken"),
  [
    ({}, []),
    ({"mixed": 1}, ["mixed is 1 but must be at most 0"]),
    ({"dropped": 2}, ["dropped is 2 but must be at most 0"]),
    ({"lag_max": 3}, ["lag_max is 3 but must be at most 2"]),
    ({"versions_alive_max": 4}, ["versions_alive_max is 4", "at most 3"]),
    ({"mixed": math.nan}, ["mixed is nan"]),
  ],
)
def test_each_broken_promise_is_named(changed, broken):
  found = summary.broken_promises(_KEPT | changed, max_staleness=2)
  assert len(found) == bool(broken)
  assert all(part in found[0] for part in broken)


def test_a_schedule_that_breaks_by_design_is_not_accused():
  values = _KEPT | {"mixed": 5, "dropped": 6}
  assert not summary.broken_promises(
    values, max_staleness=2, may_mix=True, may_drop=True
  )
