"""The paper's run at 128 GPUs, four schedules, beside what it reports.

source    DORA, arXiv 2604.26256, as in dora_paper_64.py, from which all but
          the number of GPUs and the splits comes; nothing is fitted here
command   python -m dora_jax.simulate --config=configs/sim/dora_paper_128.py
time      64 s on 2 CPU cores, shared with other programs
result    minutes a step, predicted and published: sync 18.91, 20.23 (-7 %);
          one_step_off 14.73, 14.00 (+5 %); partial_rollout 11.62, 13.95
          (-17 %); dora 8.20, 10.46 (-22 %)
"""

from configs.sim import dora_paper_64


def get_config():
  """Returns the config with its four cases."""
  config = dora_paper_64.get_config()
  config.cluster.devices = 128
  config.cluster.trainer_devices = 64
  config.cases.one_step_off.cluster.trainer_devices = 64
  published = config.published
  for name, step_min, rollout_min, tokens_per_s in (
    ("sync", 20.23, 14.8, 16_070),
    ("one_step_off", 14.0, None, 23_200),
    ("partial_rollout", 13.95, 7.3, 30_750),
    ("dora", 10.46, 2.5, 34_135),
  ):
    published[name]["step_s"] = 60 * step_min
    published[name]["tokens_per_s"] = tokens_per_s
    if rollout_min is None:
      del published[name]["rollout_not_hidden_s"]
    else:
      published[name]["rollout_not_hidden_s"] = 60 * rollout_min
  return config
