import json

import pytest

from tests.runtime import tiny

_MISMATCH = "train/mismatch_kl_k3"


def test_a_run_leaves_what_it_promises(tmp_path):
  status = tiny.run(tiny.config(), tmp_path)
  assert status == 0
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["steps"] == 3
  assert summary["mixed"] == summary["dropped"] == 0
  assert 0 <= summary["lag_max"] <= 1
  assert sum(v for k, v in summary.items() if k.startswith("lag_count/")) == 24
  assert {"accuracy_before", "accuracy_after", "tokens_per_s"} <= set(summary)
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  steps = [json.loads(line) for line in lines]
  assert [s["step"] for s in steps if "train/loss" in s] == [1, 2, 3]
  trace = json.loads((tmp_path / "trace.json").read_text())
  names = {e["args"].get("name") for e in trace if e["ph"] == "M"}
  assert {"generator 0", "generator 1", "trainer", "publish"} <= names
  spans = {e["name"] for e in trace if e["ph"] == "X"}
  assert {"step 0", "step 1", "step 2", "v0", "v1"} <= spans
  # Trajectories of the first step are fresh, which shows the mismatch.
  found = [s[_MISMATCH] for s in steps if _MISMATCH in s]
  assert found
  assert summary["mismatch_kl_k3"] == pytest.approx(sum(found) / len(found))
  assert (tmp_path / "config.json").exists()
  assert list(tmp_path.glob("events.out.tfevents.*"))
  assert (tmp_path / "checkpoints" / "3").is_dir()
