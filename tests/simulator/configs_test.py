"""Every config of configs/sim can be run, with each of its cases."""

import pathlib

import pytest

from dora_jax import config as config_lib
from dora_jax.simulator import pieces, sweep

_FOLDER = pathlib.Path(__file__).parents[2] / "configs" / "sim"


@pytest.mark.parametrize(
  "path", sorted(_FOLDER.glob("*.py")), ids=lambda path: path.stem
)
def test_a_config_can_be_run(path):
  config = config_lib.load(path)
  for setting in sweep.cases(config):
    chosen = sweep.changed(config, setting.overrides)
    pieces.validate(chosen)
    made = pieces.make_world(chosen, cost=pieces.make_costs(chosen))
    assert made.num_events == 0
  published = set(config.published.to_dict())
  assert published <= {setting.name for setting in sweep.cases(config)}
