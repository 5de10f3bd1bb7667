"""The trace is valid JSON once closed and whole lines before that."""

import json
import math
import threading

import pytest

from dora_jax import trace


def test_a_closed_trace_is_json_with_named_sorted_tracks(tmp_path):
  timeline = trace.Trace(tmp_path / "trace.json")
  lane = timeline.track("lane 0", "generators")
  other = timeline.track("train", "trainer")
  assert timeline.track("lane 0", "generators") == lane != other
  timeline.span(lane, "v3", 1.5, 1.75, requests=4, kl=math.nan)
  timeline.instant(other, "published", 2.0, version=4)
  timeline.counter("versions", 2.0, alive=2)
  timeline.close()
  timeline.span(lane, "v3", 3.0, 4.0)  # a part that stops late does no harm
  timeline.close()
  events = json.loads((tmp_path / "trace.json").read_text())
  names = {
    (e["pid"], e["tid"]): e["args"]["name"]
    for e in events
    if e["name"] == "thread_name"
  }
  groups = {
    e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"
  }
  span, mark, count = events[-3:]
  assert (span["ts"], span["dur"], span["name"]) == (1.5e6, 0.25e6, "v3")
  assert span["args"] == {"requests": 4, "kl": "nan"}
  assert names[span["pid"], span["tid"]] == "lane 0"
  assert groups[span["pid"]] == "generators"
  assert names[mark["pid"], mark["tid"]] == "train"
  assert count["args"] == {"alive": 2} and groups[count["pid"]] == "counters"


def test_a_dead_process_leaves_an_array_that_lacks_only_its_end(tmp_path):
  path = tmp_path / "trace.json"
  timeline = trace.Trace(path)
  track = timeline.track("a\nb", "g")
  timeline.instant(track, "x", 0.0)
  left = path.read_text()
  timeline.close()
  assert json.loads(left + "]")[-1]["name"] == "x"
  assert len(left.splitlines()) == 1 + len(json.loads(left + "]"))


def test_a_second_run_keeps_the_first_ones_trace(tmp_path):
  for run in range(3):
    timeline = trace.Trace(tmp_path / "trace.json")
    timeline.instant(timeline.track("t", "g"), f"run {run}", 0.0)
    timeline.close()
  kept = ["trace.1.json", "trace.2.json", "trace.json"]
  assert sorted(p.name for p in tmp_path.iterdir()) == kept
  for run, name in enumerate(kept):
    assert json.loads((tmp_path / name).read_text())[-1]["name"] == f"run {run}"


def test_threads_share_it_and_lose_nothing(tmp_path):
  timeline = trace.Trace(tmp_path / "trace.json")

  def draw(worker: int) -> None:
    track = timeline.track(f"worker {worker}", "workers")
    for i in range(200):
      timeline.span(track, "v0", float(i), i + 0.5, i=i)

  threads = [threading.Thread(target=draw, args=(w,)) for w in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  timeline.close()
  events = json.loads((tmp_path / "trace.json").read_text())
  spans = {(e["tid"], e["args"]["i"]) for e in events if e["ph"] == "X"}
  assert len(spans) == 4 * 200


def test_a_span_that_ends_before_it_starts_is_refused(tmp_path):
  timeline = trace.Trace(tmp_path / "trace.json")
  with pytest.raises(ValueError, match="one clock"):
    timeline.span(timeline.track("t", "g"), "v0", 2.0, 1.0)
  timeline.close()
