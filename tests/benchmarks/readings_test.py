"""What runs leave behind gives the values that we work out by hand."""

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


def _run(workdir, schedule, round_id, **values):
  workdir.mkdir(exist_ok=True)
  return readings.Run(
    schedule=schedule,
    round_id=round_id,
    seed=5 + round_id,
    workdir=workdir,
    values={"tokens_per_s": 1.0, "step_s": 1.0, **values},
  )


def test_rounds_are_folded_and_ratios_taken_within_each(tmp_path):
  # The second round is twice as slow for all; the third has no such excuse.
  speeds = {"dora": (40.0, 20.0, 60.0), "sync": (20.0, 10.0, 20.0)}
  runs = [
    _run(tmp_path, name, r, tokens_per_s=speed, moved=r, lag_max=2 - r)
    for name, of_rounds in speeds.items()
    for r, speed in enumerate(of_rounds)
  ]
  values = readings.by_schedule(["dora", "sync"], runs)
  assert values["tokens_per_s/dora"] == 40 and values["tokens_per_s/sync"] == 20
  assert values["moved/dora"] == 3 and values["lag_max/sync"] == 2
  assert readings.ratios("dora", "sync", runs) == {
    "ratio/dora_over_sync": 2.0,
    "ratio_min/dora_over_sync": 2.0,
    "ratio_max/dora_over_sync": 3.0,
  }


def test_tail_is_the_longest_completion_of_each_step(tmp_path):
  _write(tmp_path)
  runs = [_run(tmp_path, "sync", 0), _run(tmp_path, "dora", 0, step_s=5.0)]
  lengths = {(5, 2): [1, 2, 30]}
  # The run of sync generates for 15 s before step 2: half a second a token.
  assert readings.work(runs, lengths=lengths, decode_step_s=None) == {
    "length_median": 2,
    "length_mean": 11,
    "length_max": 30,
    "decode_step_s": pytest.approx(0.5),
    "tail_s": pytest.approx(15.0),
    "tail_over_step": pytest.approx(3.0),
  }
  lengths = {(5, 2): [1, 2, 30], (5, 3): [10]}
  paced = readings.work(runs[1:], lengths=lengths, decode_step_s=0.1)
  assert paced["tail_s"] == pytest.approx(2.0)
  assert paced["tail_over_step"] == pytest.approx(0.4)
  # Without a pace only sync tells how long a decode step takes.
  alone = readings.work(runs[1:], lengths=lengths, decode_step_s=None)
  assert set(alone) == {"length_median", "length_mean", "length_max"}
