"""What is noticed beside failures: stalls, slow meshes, rewards that fail."""

import json
import threading
import time

import numpy as np
import pytest

from dora_jax import types
from dora_jax.runtime import part, quarantine, replicas, watchdog
from dora_jax.tasks import reward_pool
from tests.coordinator import world as world_lib


class _Busy(part.Part):
  """Is at one thing until it is let go."""

  def __init__(self):
    super().__init__(name="generator mesh 1", post=lambda message: None)
    self.let_go = threading.Event()

  def work(self):
    self.begin("decoding")
    self.let_go.wait()


class _Idle(part.Part):
  """Waits for orders."""

  def __init__(self):
    super().__init__(name="trainer", post=lambda message: None)

  def work(self):
    self.begin("waiting for a batch")
    self.take(block=True)


def watch(world, parts, workdir, **limits):
  """A watchdog that has not looked for 100 s."""
  made = watchdog.Watchdog(
    coordinator=world.coordinator,
    parts=parts,
    moves=lambda: {(0, 1): ((0, 1),)},
    workdir=workdir,
    **limits,
  )
  made._looked_s -= 100.0
  return made


def test_a_stall_is_told_with_who_waits_for_which_ids(tmp_path, caplog):
  world = world_lib.World(
    max_staleness=1,
    prompts_per_batch=2,
    group_size=2,
    num_steps=3,
    slots=[4, 4],
  )
  # Both generators serve version 0 and have members to decode.
  while not world.running:
    world.step(0)
  busy, idle = _Busy(), _Idle()
  for each in (busy, idle):
    each.start()
  while "wait" not in idle.doing or busy.doing != "decoding":
    pass
  try:
    made = watch(world, [idle, busy], tmp_path, stall_s=60.0, give_up_s=0.0)
    made._heard_s -= 75.0
    busy.since_s -= 80.0
    idle.since_s -= 90.0
    assert made.look(["the record goes on with nothing"])
    # Each is told once; and there is no looking all the time.
    made._looked_s -= 100.0
    assert not made.look() and not made.look()
    busy.since_s = idle.since_s
    giving_up = watch(world, [busy], tmp_path, stall_s=99.0, give_up_s=85.0)
    with pytest.raises(watchdog.GaveUp, match=r"90 s \(config.runtime.give_up"):
      giving_up.look()
  finally:
    busy.let_go.set()
    idle.send(None)
    for each in (busy, idle):
      each.join()
  text, last = (record.getMessage() for record in caplog.records)
  assert "Still at a stand after 90 s" in last
  assert "Nothing has happened for 75 s" in text
  assert "generator mesh 1 is at one thing, decoding, for 80 s" in text
  assert "trainer waits for 2 more groups" in text
  assert "group 0 of version 0 is open" in text and "on generator 0" in text
  assert "1 requests move from generator 0 to 1" in text
  assert "the record goes on with nothing" in text
  # It waits for orders, which is no stall of its own.
  assert "trainer is at one thing" not in text
  state = json.loads((tmp_path / "stall.json").read_text())
  assert state["coordinator"]["newest_version"] == 0
  running = {
    (group["group_id"], int(member))
    for group in state["groups"]
    for member in group["running"]
  }
  assert running == set(world.running)
  assert "watching_test.py" in (tmp_path / "stall_threads.txt").read_text()


def test_a_part_that_has_ended_is_not_stuck(tmp_path):
  world = world_lib.World(
    max_staleness=1, prompts_per_batch=1, group_size=1, num_steps=1, slots=[1]
  )
  busy = _Busy()
  busy.let_go.set()
  busy.start()
  busy.join()
  made = watch(world, [busy], tmp_path, stall_s=60.0, give_up_s=60.0)
  busy.since_s -= 100.0
  assert not made.look()
  assert not list(tmp_path.iterdir())


def test_a_mesh_far_below_its_peers_is_told_of_once(caplog):
  # Slot steps and busy seconds; windows are 30 s.
  done = {"mesh 0": [0, 0.0], "mesh 1": [0, 0.0], "mesh 2": [0, 0.0]}

  def read():
    return {
      name: replicas.Work(slot_steps=steps, busy_s=busy_s)
      for name, (steps, busy_s) in done.items()
    }

  made = replicas.Replicas(read, now_s=time.monotonic())
  now_s = time.monotonic()
  assert made.metrics() == {}
  # 100 a second, 30 a second, and one that hardly decoded at all.
  for rates in ((100, 30, 1.0), (100, 30, 1.0)):
    now_s += 31.0
    done["mesh 0"][0] += rates[0] * 20
    done["mesh 0"][1] += 20.0
    done["mesh 1"][0] += rates[1] * 10
    done["mesh 1"][1] += 10.0
    done["mesh 2"][1] += rates[2]
    made.look(now_s)
    made.look(now_s + 1.0)
  assert made.metrics() == {"rollout/slowest_generator_share": 0.3}
  (line,) = [r.getMessage() for r in caplog.records]
  assert line.startswith("mesh 1 is slow") and "30 slot steps a second" in line
  assert "30% of its peers' median" in line
  # Rates over the median of the others, worked out by hand.
  shares = replicas.shares_of_peers({"a": 1.0, "b": 2.0, "c": 4.0})
  assert shares == {"a": 1 / 3, "b": 2 / 2.5, "c": 4 / 1.5}
  assert replicas.shares_of_peers({"a": 1.0}) == {}


def judge(made, job, error=None):
  prompt = types.Prompt(
    prompt_id=3, tokens=np.arange(2, dtype=np.int32), text="1+\x1b=", answer="2"
  )
  reward = 1.0 if error is None else None
  made.note(
    reward_pool.ScoreResult(
      job=job, reward=reward, components={}, error=error, num_tries=2
    ),
    prompt,
    "4\n",
  )


def test_too_many_errors_ring_and_nothing_but_errors_ends(tmp_path, caplog):
  made = quarantine.Quarantine(tmp_path)
  for index in range(90):
    judge(made, ("rollout", index, 0))
  for index in range(9):
    judge(made, ("rollout", index, 1), "timed out")
  assert not caplog.records and made.error_share == 9 / 99
  judge(made, ("rollout", 9, 1), "timed out")
  judge(made, ("rollout", 10, 1), "timed out")
  (line,) = [r.getMessage() for r in caplog.records]
  assert "10 of the last 100 completions have no reward" in line
  assert made.metrics() == {
    "reward/retried": 101.0,
    "reward/quarantined": 11.0,
    "reward/error_share": 0.11,
  }
  lines = (tmp_path / "quarantine.jsonl").read_text().splitlines()
  assert len(lines) == 11 and "\\u001b" in lines[0]
  assert json.loads(lines[-1]) == {
    "purpose": "rollout",
    "group_id": 10,
    "member": 1,
    "prompt_id": 3,
    "prompt": "1+\x1b=",
    "answer": "2",
    "completion": "4\n",
    "error": "timed out",
    "num_tries": 2,
  }
  with pytest.raises(quarantine.RewardsFail, match="None of the last 100 comp"):
    for index in range(100):
      judge(made, ("rollout", index, 2), "worker died")
