"""Sweeps: what is run, what is best, and how it is shown."""

import io

import pytest
import rich.console

from dora_jax import simulate
from dora_jax.simulator import fit, pieces, sweep
from tests.simulator import small


def test_a_sweep_is_the_product_of_its_values():
  settings = sweep.product(
    small.make_config(),
    "coordinator.max_staleness=1,3;coordinator.moves=True,False",
  )
  assert [setting.overrides for setting in settings] == [
    {"coordinator.max_staleness": k, "coordinator.moves": moves}
    for k in (1, 3)
    for moves in (True, False)
  ]
  assert settings[0].name == "max_staleness=1 moves=True"


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("coordinator.nothing=1", r"config\.coordinator\.nothing does not exist"),
    ("coordinator.max_staleness=one", "no int"),
    ("", "names no field"),
  ],
)
def test_a_sweep_that_cannot_be_read_is_refused(text, message):
  with pytest.raises(ValueError, match=message):
    sweep.product(small.make_config(), text)


def test_the_best_keeps_its_bound():
  results = [
    {"tokens_per_s": 100.0, "lag_mean": 2.0},
    {"tokens_per_s": 80.0, "lag_mean": 1.0},
    {"tokens_per_s": 70.0, "lag_mean": 0.0},
  ]
  assert sweep.best(results, None) == 0
  assert sweep.best(results, sweep.parse_bound("lag_mean<=1")) == 1
  assert sweep.best(results, sweep.parse_bound("lag_mean <= -1")) is None
  with pytest.raises(ValueError, match="lag_meen"):
    sweep.best(results, sweep.parse_bound("lag_meen<=1"))
  with pytest.raises(ValueError, match="--best"):
    sweep.parse_bound("lag_mean<1")


def test_settings_run_as_they_would_alone_and_are_shown(tmp_path):
  config = small.make_config()
  config.cases.fresh = {"coordinator": {"max_staleness": 0}}
  config.cases.stale = {"coordinator": {"max_staleness": 3}}
  config.published.stale = {"step_s": 1.0, "lag_mean": 1.0}
  settings = sweep.cases(config)
  stream = io.StringIO()
  console = rich.console.Console(file=stream, width=200)
  results = simulate.run(config, settings, num_processes=1, console=console)
  for setting, values in zip(settings, results, strict=True):
    assert values == pieces.simulate(sweep.changed(config, setting.overrides))
  flat = simulate.summarise(config, settings, results)
  stale = results[1]
  assert flat["error/stale_3"] == pytest.approx(stale["step_s"] - 1)
  assert flat["error_lag_mean/stale_3"] == pytest.approx(stale["lag_mean"] - 1)
  assert flat["lag_mean/fresh"] == 0.0
  best = simulate.show(
    config,
    settings,
    results,
    bound=sweep.parse_bound("lag_mean<=0"),
    console=console,
  )
  assert best == 0
  assert "Most tokens/s with lag_mean <= 0: fresh" in stream.getvalue()


def test_a_picture_is_drawn(tmp_path):
  from dora_jax.simulator import picture

  values = pieces.simulate(small.make_config())
  path = tmp_path / "sweep.png"
  picture.draw(["a", "b"], [values, values], path, best=1)
  assert path.read_bytes().startswith(b"\x89PNG")


def test_a_fit_finds_the_efficiencies_that_made_what_is_published():
  config = small.make_config(
    coordinator__schedule="sync",
    coordinator__num_steps=3,
    measure__warmup_steps=1,
    measure__cooldown_steps=0,
  )
  config.model.name = "qwen2.5-7b"
  config.cluster.accelerator = "H100"
  config.generator.chunk_steps = 16
  config.cost.training, config.cost.bandwidth = 0.21, 0.37
  published = pieces.simulate(config)
  config.cost.training, config.cost.bandwidth = 0.5, 0.8
  (setting,) = sweep.cases(config)
  found = fit.efficiencies(config, setting, published)
  assert found["cost.training"] == pytest.approx(0.21, rel=0.02)
  assert found["cost.bandwidth"] == pytest.approx(0.37, rel=0.02)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"cluster__trainer_devices": 3}, r"config\.cluster\.trainer_devices"),
    ({"generator__devices": 5}, r"config\.generator\.devices"),
    ({"generator__slots": 0}, r"config\.generator\.slots"),
    ({"generator__kv_tokens": 100}, "100"),
    ({"model__name": "gpt"}, r"config\.model\.name"),
    ({"cluster__accelerator": "abacus"}, r"config\.cluster\.accelerator"),
    ({"coordinator__schedule": "later"}, r"config\.coordinator\.schedule"),
    ({"coordinator__rollout_groups": "some"}, "rollout_groups"),
    ({"measure__cooldown_steps": 7}, r"config\.measure\.cooldown_steps"),
    ({"workload__turns": 600}, r"config\.workload\.turns"),
  ],
)
def test_a_config_that_cannot_run_is_refused(change, message):
  with pytest.raises(ValueError, match=message):
    pieces.simulate(small.make_config(**change))


def test_a_fit_to_what_nobody_published_is_refused():
  with pytest.raises(ValueError, match="--fit is 'dora'"):
    simulate.fit_case(small.make_config(), "dora")
