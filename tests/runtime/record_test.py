"""Events on file: the same come back, and make the same decisions."""

import dataclasses
import random
import typing
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from dora_jax.coordinator import events as ev
from dora_jax.runtime import record
from tests.coordinator import world

ARGUMENTS: dict[str, Any] = {
  "max_staleness": 2,
  "prompts_per_batch": 3,
  "group_size": 2,
  "num_steps": 6,
  "slots": [4, 3, 2],
}


# Events are made outside of the strategy: what checks their types draws random
# numbers, which hypothesis forbids inside.
def _any_fields(cls) -> st.SearchStrategy[tuple[type, dict[str, Any]]]:
  hints = typing.get_type_hints(cls)
  values = {name: st.from_type(hint) for name, hint in hints.items()}
  return st.tuples(st.just(cls), st.fixed_dictionaries(values))


ANY_EVENT = st.one_of(*map(_any_fields, typing.get_args(ev.Event)))
ANY_TIME = st.floats(allow_nan=False, allow_infinity=False)


class _Recorded(world.World):
  """Keeps the events it sends, and the commands that follow from each."""

  def __init__(self, **arguments):
    self.events: list[record.TimedEvent] = []
    self.commands: list[list[ev.Command]] = []
    super().__init__(**arguments)

  def send(self, event):
    self.commands.append([])
    super().send(event)
    self.events.append((event, self.now_s))

  def carry_out(self, command):
    self.commands[-1].append(command)
    super().carry_out(command)


class _Following(_Recorded):
  """Sends only what the gate lets through."""

  def __init__(self, gate: record.ReplayGate, **arguments):
    self.gate = gate
    super().__init__(**arguments)

  def send(self, event):
    self.gate.offer(event)
    if self.stop is None:
      for recorded, _ in self.gate.next():
        super().send(recorded)


def _choices(seed: int):
  rng = random.Random(seed)
  while True:
    yield rng.randrange(1 << 20)


@pytest.fixture(scope="module")
def recorded() -> _Recorded:
  run = _Recorded(**ARGUMENTS)
  run.run(_choices(0))
  return run


def _write(path, events, header=None) -> None:
  writer = record.EventWriter(path, header or {})
  for event, now_s in events:
    writer.write(event, now_s)
  writer.close()


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(st.lists(st.tuples(ANY_EVENT, ANY_TIME), max_size=20))
def test_events_come_back_exactly(tmp_path_factory, drawn):
  events = [(cls(**values), now_s) for (cls, values), now_s in drawn]
  path = tmp_path_factory.mktemp("record") / record.FILE_NAME
  header = {"schedule": "dora", "slots": [4, 2], "rollout_groups": None}
  _write(path, events, header)
  found_header, found = record.read_events(path)
  assert found_header == header
  # repr tells -0.0 from 0.0, and a list from a tuple.
  assert repr(list(found)) == repr(events)


def test_cut_file_is_read_up_to_its_last_whole_line(tmp_path, recorded):
  path = tmp_path / record.FILE_NAME
  _write(path, recorded.events)
  data = path.read_bytes()
  num_read = [0]
  for end in range(len(data) - 400, len(data), 7):
    path.write_bytes(data[:end])
    found = list(record.read_events(path)[1])
    assert found == recorded.events[: len(found)]
    num_read.append(len(found))
  assert num_read == sorted(num_read)
  assert num_read[-1] > 0.8 * len(recorded.events)


def test_killed_run_leaves_all_but_the_last_second(tmp_path):
  path = tmp_path / record.FILE_NAME
  writer = record.EventWriter(path, {})
  times_s = [100.0, 100.4, 100.9, 101.0, 101.1]
  for version, now_s in enumerate(times_s):
    writer.write(ev.StepDone(version=version), now_s)
  assert [now_s for _, now_s in record.read_events(path)[1]] == times_s[:4]
  writer.flush()
  assert [now_s for _, now_s in record.read_events(path)[1]] == times_s
  for _ in range(300):
    writer.write(ev.StepDone(version=0), 101.2)
  assert len(list(record.read_events(path)[1])) == 5 + 256
  writer.close()
  writer.close()
  assert len(list(record.read_events(path)[1])) == 305


def test_records_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
  path = tmp_path / record.FILE_NAME
  path.write_bytes(b"")
  with pytest.raises(ValueError, match="no whole line"):
    record.read_events(path)
  _write(path, [])
  monkeypatch.setitem(record._FIELDS, "StepDone", ["version", "colour"])
  with pytest.raises(ValueError, match=r"StepDone with .*\['version'\]"):
    record.read_events(path)
  monkeypatch.setattr(record, "_FORMAT", 2)
  with pytest.raises(ValueError, match="format 1, but this code reads 2"):
    record.read_events(path)


def test_bare_replay_reproduces_every_command(tmp_path, recorded):
  path = tmp_path / record.FILE_NAME
  _write(path, recorded.events, ARGUMENTS)
  arguments, events = record.read_events(path)
  # A world without generators has sent nothing yet.
  arguments["slots"] = []
  fresh = world.World(**arguments).coordinator
  assert record.replay(fresh, events) == recorded.commands


@pytest.mark.parametrize("seed", range(1, 6))
def test_gate_puts_shuffled_events_into_recorded_order(recorded, seed):
  gate = record.ReplayGate(recorded.events)
  real = [event for event, _ in recorded.events]
  random.Random(seed).shuffle(real)
  fed, offered = [], []
  for event in real:
    if isinstance(event, ev.Finished):
      event = dataclasses.replace(event, generator_id=99)
    gate.offer(event)
    offered.append(record._counterpart(event))
    fed += gate.next()
    assert fed == recorded.events[: len(fed)]
    assert {record._counterpart(e) for e, _ in fed} <= {None, *offered}
    if gate.waiting_for() is not None:
      assert gate.waiting_for() == recorded.events[len(fed)][0]
  assert fed == recorded.events and gate.waiting_for() is None
  with pytest.raises(ValueError, match=f"after {len(fed)} events, the last "):
    gate.next()


@pytest.mark.parametrize("seed", range(1, 6))
def test_run_with_other_timing_takes_the_recorded_decisions(recorded, seed):
  gate = record.ReplayGate(recorded.events)
  run = _Following(gate, **ARGUMENTS)
  run.run(_choices(seed))
  assert run.commands == recorded.commands
  assert run.batches == recorded.batches


def test_counterparts_are_counted():
  scored = ev.Scored(group_id=0, member=0)
  gate = record.ReplayGate([(scored, 1.0), (ev.Tick(), 2.0), (scored, 3.0)])
  assert gate.next() == []
  gate.offer(ev.Tick())
  assert gate.next() == []
  gate.offer(scored)
  assert gate.next() == [(scored, 1.0), (ev.Tick(), 2.0)]
  assert gate.next() == [] and gate.waiting_for() == scored
  gate.offer(scored)
  assert gate.next() == [(scored, 3.0)]


def test_member_that_finished_before_its_cancel_is_forgotten():
  finished = ev.Finished(
    generator_id=0, group_id=3, member=1, version=2, num_tokens=7
  )
  cancelled = ev.Cancelled(generator_id=0, cancelled=((3, 1, 4),))
  gate = record.ReplayGate([(cancelled, 1.0), (finished, 2.0)])
  gate.offer(finished)
  gate.offer(dataclasses.replace(cancelled, cancelled=()))
  assert gate.next() == [(cancelled, 1.0)]
  gate.offer(finished)
  assert gate.next() == [(finished, 2.0)]


def test_stop_is_passed_on_and_what_breaks_the_record_is_named():
  finished = ev.Finished(
    generator_id=0, group_id=3, member=1, version=2, num_tokens=7
  )
  scored = ev.Scored(group_id=3, member=1)
  stop = ev.StopRequested(reason="sigint")
  gate = record.ReplayGate([(finished, 5.0), (scored, 6.0)])
  gate.offer(stop)
  assert gate.next() == [(stop, 5.0)]
  with pytest.raises(ValueError, match="Generator 1 is lost"):
    gate.offer(ev.GeneratorLost(generator_id=1))
  # The same member of another version is not what the record waits for.
  gate.offer(dataclasses.replace(finished, version=1))
  assert gate.next() == []
  gate.offer(dataclasses.replace(finished, generator_id=1))
  assert gate.next() == [(finished, 5.0)]
  gate.offer(ev.ScoreFailed(group_id=3, member=1, reason="reward_failed"))
  with pytest.raises(ValueError, match=r"left its record at event 1.*Failed"):
    gate.next()
  gate = record.ReplayGate([(finished, 5.0)])
  gate.offer(dataclasses.replace(finished, num_tokens=8))
  with pytest.raises(ValueError, match="num_tokens=8"):
    gate.next()
