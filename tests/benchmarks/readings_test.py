"""A run's measured values are those of its measured steps, worked by hand."""

import json

import pytest

from benchmarks import readings
from dora_jax import trace


def _write(workdir, *, truncated_share=1.0):
  """Four steps, that end at 10, 20, 40, 60 s; the step's number s sets counts.

  Generator 0 decodes from 15 to 25 and from 20 to 35 s, generator 1 never, and
  the evaluation's lane all the time.
  """
  lines = []
  timeline = trace.Trace(workdir / "trace.json")
  trainer = timeline.track("trainer", "trainer")
  tracks = [
    timeline.track(name, "generators")
    for name in ("generator 0", "generator 1", "evaluation")
  ]
  timeline.span(tracks[0], "v1", 15.0, 25.0)
  timeline.span(tracks[0], "v2", 20.0, 35.0)
  timeline.span(tracks[2], "v0", 0.0, 60.0)
  for step, end_s in enumerate((10.0, 20.0, 40.0, 60.0), start=1):
    timeline.span(trainer, f"step {step - 1}", end_s - 2, end_s - 1)
    timeline.counter("versions alive", end_s, count=1)
    lines.append(
      {
        "step": step,
        "time_s": 1000.0 + end_s,
        "train/num_tokens": 100.0 * step,
        "train/truncated_share": truncated_share,
        "train/step_s": float(step),
        "train/lag_mean": 0.5 * step,
        "train/lag_max": step,
        "rollout/versions_alive": step,
        "rollout/mixed": 0.0,
        "rollout/groups_dropped": 2.0 * step,
        "ledger/reprefilled": 0.0,
        "ledger/moved": 3.0 * step,
        "ledger/moved_tokens": 30.0 * step,
        "rollout/trainer_wait_data_s": 4.0 * step,
        "rollout/trainer_wait_straggler_s": 0.0,
        "rollout/busy_slot_steps": 10.0 * step,
        "rollout/total_slot_steps": 40.0 * step,
      }
    )
  lines.insert(2, {"step": 2, "time_s": 1.0, "evaluation/accuracy": 0.5})
  timeline.close()
  path = workdir / "metrics.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _read(workdir):
  return readings.read(
    workdir,
    num_warmup=1,
    num_steps=2,
    num_trajectories=8,
    group_size=4,
    prompt_length=5,
  )


def test_values_are_those_of_the_measured_steps(tmp_path):
  _write(tmp_path)
  # Steps 2 and 3, from 10 to 40 s. Generator 0 decodes for 20 of these 30 s.
  assert _read(tmp_path) == pytest.approx(
    {
      "tokens_per_s": (200 + 300 + 2 * 8 * 5) / 30,
      "step_s": 15.0,
      "train_s": 2.5,
      "bubble_share": 0.75,
      "generator_idle_share": (10 / 30 + 1) / 2,
      "lag_mean": 1.25,
      "lag_max": 3,
      "versions_max": 3,
      "mixed": 0,
      "dropped": 4 * 4,
      "reprefilled": 0,
      "moved": 6,
      "moved_tokens": 60,
      "wait_data_s": 4.0,
      "wait_straggler_s": 0.0,
    }
  )


def test_a_synchronous_rollout_lasts_from_step_to_step(tmp_path):
  _write(tmp_path)
  # Step 2 begins at 38 s; the slice that begins after 20 s ends at 35 s.
  assert readings.rollout_s(tmp_path, 2) == pytest.approx(15.0)


def test_completions_that_end_by_a_stop_token_are_refused(tmp_path):
  _write(tmp_path, truncated_share=0.9)
  with pytest.raises(ValueError, match="ended by a stop token"):
    _read(tmp_path)
