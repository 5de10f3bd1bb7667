import logging as std_logging

import jax.numpy as jnp
import pytest

from dora_jax.generator import budget
from dora_jax.generator.attention import xla
from dora_jax.runtime import pieces
from tests.generator import tiny
from tests.runtime import tiny as tiny_run

_GIB = 2**30


class _Device:
  """What a GPU says of its memory."""

  def __init__(self, limit, in_use):
    self._stats = {"bytes_limit": limit, "bytes_in_use": in_use}

  def memory_stats(self):
    return self._stats


def _choose(**changes):
  settings = {
    "memory": budget.Memory(free_bytes=10 * _GIB, source="left"),
    "share": 0.5,
    "reserved_bytes": 4 * _GIB,
    "bytes_a_page": 2**20,
    "pages_a_slot": 10,
    "num_slots": 4,
  }
  return budget.choose_num_pages(**(settings | changes))


def test_every_slot_reaches_its_limit_if_there_is_room(caplog):
  with caplog.at_level(std_logging.INFO, logger="absl"):
    assert _choose() == 41
    # Half of 6 GiB in pages of 1 MiB.
    assert _choose(num_slots=1000) == 3072
  assert "3072 pages, where 1000 slots at their limit need 10001" in caplog.text
  assert "10.00 GiB left, 4.00 GiB of it reserved" in caplog.text


@pytest.mark.parametrize(
  "changes",
  [{"pages_a_slot": 3072}, {"reserved_bytes": 11 * _GIB}, {"share": 0.001}],
)
def test_a_request_that_could_never_fit_is_refused_with_the_numbers(changes):
  with pytest.raises(ValueError, match=r"need \d+ pages.*GiB.*max_length"):
    _choose(**changes)


def test_memory_is_what_is_left_on_the_fullest_device_shared_by_its_meshes():
  roomy, full = _Device(9 * _GIB, _GIB), _Device(9 * _GIB, 5 * _GIB)
  measure = lambda *meshes: budget.measure_memory(meshes, 0).free_bytes
  assert measure([roomy], [full]) == 8 * _GIB
  assert measure([roomy, full]) == 4 * _GIB
  assert measure([full], [full]) == 2 * _GIB


def test_a_page_takes_what_the_pool_gives_it():
  for tensor in (1, 2):
    pool = tiny.make_worker(tensor=tensor, num_pages=30)._pool.kv
    in_all = pool.keys.nbytes + pool.values.nbytes
    expected = budget.page_bytes(
      xla.XlaAttention(),
      tiny.CONFIG,
      mesh=tiny.make_mesh(tensor),
      page_size=4,
      dtype=jnp.float32,
    )
    assert in_all == 30 * expected * tensor


def test_a_run_gives_every_slot_its_limit_where_the_host_has_room():
  config = tiny_run.config(mesh__lanes=2)
  shape = pieces.make_model_config(config, pieces.make_tokenizer(config))
  choose = lambda config, mesh_id, lanes: pieces.choose_num_pages(
    config, shape, pieces.make_meshes(config), mesh_id, num_lanes=lanes
  )
  # 4 slots a lane, each of 12 tokens, which take 3 pages.
  assert choose(config, 0, 3) == 1 + 3 * 4 * 3
  assert choose(config, 1, 2) == 1 + 2 * 4 * 3
  config.generator.num_pages = 7
  assert choose(config, 0, 3) == 7
  config.generator.num_pages = 0
  config.generator.memory_share = 1e-9
  with pytest.raises(ValueError, match=r"config\.generator\.memory_share"):
    choose(config, 0, 3)
