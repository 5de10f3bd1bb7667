"""Two generator meshes as threads, without coordinator, trainer or runtime."""

import contextlib
import json
import queue
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from dora_jax import trace
from dora_jax.coordinator import events as ev
from dora_jax.model import transformer
from dora_jax.parallel import axes
from dora_jax.runtime import canary, generating, orders, part
from dora_jax.weights import store as store_lib
from tests.generator import tiny

_SETTINGS = {"stop_ids": (), "chunk_steps": 2}
_REQUESTS = [
  tiny.make_request(group_id, member, length=9, max_new_tokens=70)
  for group_id in range(2)
  for member in range(2)
]
_NAMES = [(r.group_id, r.member) for r in _REQUESTS]
_NAMES_OF = {0: "generator 0", 1: "generator 1", 2: "generator 2"}
# Compiling takes seconds, on a busy machine many.
_PATIENCE_S = 120.0


_Message = TypeVar("_Message")


class _World:
  """Generators 0 and 1 on one mesh, 2 on another; versions 0 and 1."""

  def __init__(self, path):
    self.inbox = queue.SimpleQueue()
    self.timeline = trace.Trace(path)
    self.store = store_lib.WeightStore(
      shardings={
        mesh_id: axes.shardings(
          transformer.logical_axes(tiny.CONFIG),
          tiny.make_mesh(first=3 * mesh_id),
          axes.DECODE,
        )
        for mesh_id in range(2)
      },
      dtype=jnp.float32,
    )
    checked = canary.Canary(tokens=tiny.make_prompt(7, 9), tolerance_nats=1e-4)
    lane = tiny.make_lane()
    for version in range(2):
      # Twice the same params, so that a refresh must change no token.
      self.store.publish(version, tiny.make_params(0), holder="coordinator")
      checked.expected[version] = lane.score(checked.tokens)
    workers = [
      tiny.make_worker(lanes=[(0, 4), (1, 4)], **_SETTINGS),
      tiny.make_worker(lanes=[(2, 4)], first=3, **_SETTINGS),
    ]
    self.parts = [
      generating.GeneratorPart(
        post=self.inbox.put,
        mesh_id=mesh_id,
        worker=worker,
        names=_NAMES_OF,
        store=self.store,
        base=None,
        canary=checked,
        timeline=self.timeline,
      )
      for mesh_id, worker in enumerate(workers)
    ]
    self.sampled = []
    self.progress = []

  def send(self, order):
    self.parts[order.generator_id // 2].send(order)

  def load(self, generator_id, version, *, carries_live=False):
    self.store.reserve(
      version, holder=_NAMES_OF[generator_id], mesh_id=generator_id // 2
    )
    self.send(
      orders.LoadOrder(
        generator_id=generator_id, version=version, carries_live=carries_live
      )
    )
    return self.wait(orders.Served)

  def submit(self, generator_id, requests):
    self.send(orders.SubmitOrder(generator_id=generator_id, requests=requests))

  def extract(self, source_id, target_id, requests):
    self.send(
      orders.ExtractOrder(
        generator_id=source_id, target_id=target_id, requests=requests
      )
    )
    return self.wait(orders.Extracted)

  def restore(self, extracted, kind):
    self.send(
      orders.RestoreOrder(
        generator_id=extracted.target_id,
        source_id=extracted.source_id,
        parcels=extracted.parcels,
      )
    )
    return self.wait(kind)

  def wait(self, kind: type[_Message]) -> _Message:
    """The next message of this kind; what comes before it is kept."""
    while True:
      message: Any = self.inbox.get(timeout=_PATIENCE_S)
      if isinstance(message, part.Failure):
        raise message.error
      match message:
        case orders.Sampled():
          self.sampled += message.trajectories
        case ev.Progress():
          self.progress.append(message)
      if isinstance(message, kind):
        return message


@contextlib.contextmanager
def _world(path):
  made = _World(path)
  for each in made.parts:
    each.start()
  try:
    yield made
  finally:
    for each in made.parts:
      each.send(None)
    for each in made.parts:
      each.join(_PATIENCE_S)
    made.timeline.close()


def test_moves_refreshes_and_cancels_by_orders(tmp_path):
  with _world(tmp_path / "trace.json") as world:
    world.load(0, 0)
    world.load(1, 0)
    world.submit(0, _REQUESTS)
    # One of them is for nobody: it is named as missing.
    far = world.extract(0, 2, [*_NAMES[:3], (9, 9)])
    assert far.missing == ((9, 9),) and len(far.parcels) == 3
    failed = world.restore(far, orders.RestoreFailed)
    assert "serves version None" in str(failed.error)
    assert set(failed.requests) == set(_NAMES[:3])
    world.send(orders.ResumeOrder(generator_id=0, requests=failed.requests))
    world.load(2, 0)
    for target_id, names in ((2, _NAMES[:1]), (1, _NAMES[1:2])):
      extracted = world.extract(0, target_id, names)
      restored = world.restore(extracted, orders.Restored)
      assert restored.requests == tuple(names)
      world.send(orders.ForgetOrder(generator_id=0, requests=names))
      taken = sum(parcel.num_kv_tokens for parcel in extracted.parcels)
      assert restored.num_kv_tokens == taken
    world.send(orders.CancelOrder(generator_id=0, requests=[_NAMES[2], (9, 9)]))
    cancelled = world.wait(orders.Cancelled)
    assert [c[:2] for c in cancelled.cancelled] == [_NAMES[2]]
    assert cancelled.missing == ((9, 9),)
    served = world.load(0, 1, carries_live=True)
    assert (served.generator_id, served.version) == (0, 1)
    while len(world.sampled) < 3:
      world.wait(orders.Sampled)
    # Version 0 is on two generators still, and on no third.
    world.send(orders.UnloadOrder(generator_id=1))
    world.send(orders.UnloadOrder(generator_id=2))
  lanes = [lane for each in world.parts for lane in each.worker.lanes]
  assert not any(lane.num_live() for lane in lanes)
  assert not any(each.worker.pages_in_use for each in world.parts)
  assert lanes[0].counters.reprefilled_tokens == served.num_reprefilled
  unmoved = tiny.by_request(
    tiny.run(tiny.make_lane(lanes=[(0, 4)], **_SETTINGS), _REQUESTS)
  )
  for name, row in tiny.by_request(world.sampled).items():
    assert row[:2] == unmoved[name][:2], name
    np.testing.assert_allclose(row[2], unmoved[name][2], atol=1e-5)
  assert {t.version for t in world.sampled} == {0}
  assert world.progress and all(p.num_pages for p in world.progress)
  text = (tmp_path / "trace.json").read_text()
  names = {event.get("name") for event in json.loads(text)}
  assert {"move from 0", "pack for 1", "pack for 2", "cancel"} <= names
