"""Costs measured of a run whose costs are known."""

import json

import pytest

from dora_jax import trace
from dora_jax.coordinator import events as ev
from dora_jax.runtime import record
from dora_jax.simulator import calibrate, costs

_STEP_S, _PREFILL_S = 0.002, 0.0001
_TRAIN_S, _TRAIN_TOKEN_S = 0.3, 1e-4
_LOAD_S, _MESSAGE_S, _REWARD_S, _PUBLISH_S = 0.02, 0.005, 0.01, 0.03
_SLOTS, _PROMPT, _GROUPS, _SIZE = 4, 8, 2, 2
_NUM_STEPS = 8


def write_run(folder):
  """A synchronous run of one generator, each of whose times is as above."""
  arguments = {
    "coordinator": {"prompts_per_batch": _GROUPS, "group_size": _SIZE},
    "generator": {"slots": _SLOTS},
  }
  events = record.EventWriter(folder / record.FILE_NAME, arguments)
  timeline = trace.Trace(folder / "trace.json")
  decoding = timeline.track("generator 0", "generators")
  loading = timeline.track("to mesh 0", "weights")
  rows, now_s, num_steps = [], 0.0, 0
  for step in range(_NUM_STEPS):
    lengths = [10 + 7 * step, 20, 5 + step * step, 1]
    longest = max(lengths)
    num_steps += longest
    seconds = longest * _STEP_S + _GROUPS * _PROMPT * _PREFILL_S
    timeline.span(decoding, f"v{step}", now_s, now_s + seconds)
    now_s += seconds
    for index, length in enumerate(lengths):
      group_id, member = 2 * step + index // 2, index % 2
      finished = ev.Finished(
        generator_id=0,
        group_id=group_id,
        member=member,
        version=step,
        num_tokens=length,
      )
      events.write(finished, now_s)
      scored = ev.Scored(group_id=group_id, member=member)
      events.write(scored, now_s + _REWARD_S)
    train_s = _TRAIN_S + _TRAIN_TOKEN_S * (sum(lengths) + 4 * _PROMPT)
    now_s += _REWARD_S + train_s + _PUBLISH_S
    events.write(ev.StepDone(version=step + 1), now_s)
    timeline.counter("versions alive", now_s, count=1)
    timeline.span(loading, f"v{step + 1}", now_s, now_s + _LOAD_S)
    now_s += _LOAD_S + _MESSAGE_S
    events.write(ev.Loaded(generator_id=0, version=step + 1), now_s)
    rows.append(
      {
        "train/step_s": train_s,
        "train/num_tokens": sum(lengths),
        "weights/publish_s": _PUBLISH_S,
        "rollout/total_slot_steps": num_steps * _SLOTS,
      }
    )
  events.close()
  timeline.close()
  lines = [json.dumps(row) for row in rows]
  (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
  (folder / "trajectories").mkdir()
  sample = json.dumps({"prompt_tokens": [0] * _PROMPT})
  (folder / "trajectories" / "sampled.jsonl").write_text(sample + "\n")


def test_every_cost_is_found_again(tmp_path):
  write_run(tmp_path)
  path = calibrate.write(tmp_path, tmp_path / "out")
  found = json.loads(path.read_text())
  cost = costs.Costs(**found["costs"])
  assert cost.step_fixed_s == pytest.approx(_STEP_S, rel=1e-3)
  assert cost.prefill_token_s == pytest.approx(_PREFILL_S, rel=1e-3)
  assert cost.train_s(100) == pytest.approx(
    _TRAIN_S + 100 * _TRAIN_TOKEN_S + _PUBLISH_S
  )
  assert cost.load_s == pytest.approx(_LOAD_S, rel=1e-3)
  assert cost.message_s == pytest.approx(_MESSAGE_S, rel=1e-3)
  assert found["reward_s"] == pytest.approx(_REWARD_S)
  assert found["prompt_tokens"] == _PROMPT
  assert found["lengths"]["4"] == [24, 20]
  assert found["lengths"]["5"] == [9, 1]


def test_a_run_of_too_few_steps_is_refused(tmp_path):
  write_run(tmp_path)
  path = tmp_path / "metrics.jsonl"
  path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
  with pytest.raises(ValueError, match="4 steps"):
    calibrate.measure(tmp_path)
