"""Generators that fail while the run goes on."""

import collections
import json
import pathlib
import types

import jax
import pytest

from dora_jax.coordinator import events as ev
from dora_jax.runtime import build, local, orders, part, record
from tests.runtime import tiny

_LATER = 6


def break_engine(worker, *, after: int) -> None:
  """Lets the real engine of a mesh fail once it has decoded so many chunks."""
  decode = worker.engine.decode
  calls = iter(range(after))

  def fail(*arguments, **options):
    if next(calls, None) is None:
      raise jax.errors.JaxRuntimeError("INTERNAL: the device has gone")
    return decode(*arguments, **options)

  worker.engine.decode = fail


def children() -> set[int]:
  """Ids of the live child processes of this one."""
  tasks = pathlib.Path("/proc/self/task")
  if not tasks.is_dir():
    pytest.skip("needs /proc")
  files = [path / "children" for path in tasks.iterdir()]
  return {int(pid) for file in files for pid in file.read_text().split()}


def test_the_run_goes_on_with_the_generators_that_are_left(tmp_path, caplog):
  # Two lanes a mesh; on the first mesh is the evaluation's too.
  config = tiny.config(mesh__lanes=2, coordinator__num_steps=5)
  before = children()
  with build.build(config, tmp_path) as made:
    made.trainer_part.publish()
    broken_part, whole_part = made.generator_parts
    break_engine(broken_part.worker, after=_LATER)
    assert made.runtime.run() == "finished"
    assert made.results.summarise(extra={}, command="test") == []
    store = made.trainer_part._publisher._store
    ledger = made.runtime._coordinator.ledger
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["steps"] == 5 and summary["rollout_meshes_lost"] == 1
  assert summary["mixed"] == summary["dropped"] == 0
  assert summary["lag_max"] <= 1
  assert ledger.num_trained == 10 and not ledger.open
  ledger.tokens.check()
  # What it held is free: by name, in pages and on devices.
  for each in (broken_part, whole_part):
    assert each.worker.pages_in_use == 0 and not each.is_alive()
  holders = {h for v in store._versions.values() for h in v.holders}
  assert holders <= {"coordinator", "generator 2", "generator 3"}
  assert all(0 not in v.copies for v in store._versions.values())
  pool = broken_part.worker._pool.kv
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(pool))
  # Nobody tells an accuracy that is not that of the end.
  assert "accuracy_after" not in summary
  (said,) = [
    r.getMessage() for r in caplog.records if "failed (" in r.getMessage()
  ]
  assert "generator mesh 0 failed (decoding): JaxRuntimeError: INTERNAL" in said
  assert "Lost are generator 0, generator 1, evaluation;" in said
  assert "No held-out accuracy is measured" in said
  assert children() == before
  check_events(tmp_path)


def check_events(workdir):
  """Members of the lost generators finished elsewhere, with their version."""
  _, events = record.read_events(workdir / record.FILE_NAME)
  lost: set[int] = set()
  finished = collections.Counter()
  for event, _ in events:
    match event:
      case ev.GeneratorLost():
        lost.add(event.generator_id)
      case ev.Finished():
        assert event.generator_id not in lost
        finished[event.group_id, event.member] += 1
  assert lost == {0, 1}
  assert set(finished.values()) == {1}


def test_moves_to_and_from_a_lost_generator_end(tmp_path):
  with build.build(tiny.config(mesh__lanes=2), tmp_path) as made:
    executor, parts = made.runtime._executor, made.generator_parts
    names = ((0, 0), (0, 1))

    def move(source_id, target_id):
      command = ev.Move(
        source_id=source_id, target_id=target_id, version=0, requests=names
      )
      executor.carry_out(command)

    def pack(source_id, target_id):
      return executor.pass_on(
        orders.Extracted(
          source_id=source_id,
          target_id=target_id,
          parcels=[types.SimpleNamespace(name=names[0])],
          missing=names[1:],
        )
      )

    def ended(source_id, target_id, moved=()):
      return ev.Moved(
        source_id=source_id,
        target_id=target_id,
        moved=moved,
        left=tuple(name for name in names if name not in moved),
        num_kv_tokens=5 if moved else 0,
      )

    # From and to the mesh that is lost, packed already or not.
    for source_id, target_id in ((0, 2), (1, 2), (2, 0), (3, 0)):
      move(source_id, target_id)
    assert pack(0, 2) is None and pack(2, 0) is None
    for each in parts:
      each.take(block=False)
    executor.lose([0, 1], [7])
    assert executor.end_lost_moves() == [ended(1, 2), ended(2, 0)]
    assert executor.end_lost_moves() == []
    # What was packed goes on here or arrives there; the lost one hears nothing.
    assert pack(3, 0) == ended(3, 0)
    restored = orders.Restored(
      source_id=0, target_id=2, requests=names[:1], num_kv_tokens=5
    )
    assert executor.end_move(restored) == ended(0, 2, names[:1])
    assert not executor.moves
    load = ev.Load(generator_id=1, version=0)
    executor.carry_out(load)
    # Nobody holds a version that is in no store.
    executor.carry_out(ev.Release(version=7))
    assert parts[0]._inbox.empty()
    resumed = [
      (order.generator_id, order.requests)
      for order in parts[1].take(block=False)
      if isinstance(order, orders.ResumeOrder)
    ]
    assert resumed == [(2, names[:1]), (3, names[:1])]


def test_a_version_that_nobody_can_replace_ends_the_run(tmp_path):
  config = tiny.config(evaluation__num_prompts=0, coordinator__num_steps=1)
  with build.build(config, tmp_path) as made:
    made.trainer_part.publish()
    store = made.trainer_part._publisher._store
    # As if the trainer's copy were where the generator's is, on a dead device.
    store.reserve(0, holder="generator 0", mesh_id=0)
    for leaf in jax.tree.leaves(store.place(0, holder="generator 0")):
      leaf.delete()
    store._versions[0].source = None
    failure = part.Failure(
      part="generator mesh 0", doing="decoding", error=RuntimeError("gone")
    )
    with pytest.raises(local.PartFailed, match=r"mesh 0 failed \(decoding\)"):
      made.runtime._hear(failure)
