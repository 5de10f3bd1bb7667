"""Every setting can run in its modes, and a pace goes with paced runs alone."""

import dataclasses

import pytest

from benchmarks import one_run, schedules


@pytest.mark.parametrize("name", one_run.SETTINGS)
def test_settings_pass_the_checks_of_a_run(name):
  one_run.check(one_run.SETTINGS[name], paced=True)


def test_fixed_rbs_is_the_cap():
  config = one_run.make_config(
    one_run.SETTINGS["dora_fixed_rbs"], num_steps=1, seed=0
  ).coordinator
  cap = (config.max_staleness + 1) * config.prompts_per_batch
  assert int(config.rollout_groups) == cap


def test_a_setting_changes_the_pace_only_where_there_is_one():
  overrides = one_run.SETTINGS["dora_quick_trainer"]
  assert one_run.make_pace(overrides) == dataclasses.replace(
    one_run.PACE, train_step_s=0.1
  )
  with pytest.raises(ValueError, match=r"pace\.train_step_s.*--modes=paced"):
    one_run.check(overrides, paced=False)


def test_modes_that_cannot_run_are_refused(monkeypatch):
  def read(*flags):
    monkeypatch.setattr("sys.argv", ["schedules", "--out=x", *flags])
    return schedules._read_modes(schedules._parse())

  shared, paced = read()
  assert not shared.paced and paced.paced
  (mode,) = read("--modes=paced", "--schedules=dora_quick_trainer", "--steps=2")
  assert mode.names == ("dora_quick_trainer",) and mode.num_all_steps == 16
  with pytest.raises(ValueError, match="not among"):
    read("--modes=brisk")
  with pytest.raises(ValueError, match="not among"):
    read("--schedules=brisk")
  with pytest.raises(ValueError, match="changes the pace"):
    read("--schedules=dora_quick_trainer")


@pytest.mark.parametrize(
  ("name", "baseline"),
  [
    ("sync", "dora"),
    ("dora_fixed_rbs", "dora"),
    ("dora_fixed_rbs_quick_trainer", "dora_quick_trainer"),
    ("dora_4gen_no_moves", "dora_4gen"),
    ("dora_4gen", None),
    ("dora_quick_trainer", None),
    ("dora", None),
  ],
)
def test_dora_is_compared_on_the_same_devices_at_the_same_pace(name, baseline):
  assert one_run.baseline(name) == baseline
