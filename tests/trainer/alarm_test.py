"""The trend alarm rings once, at a trend, and not at a spike."""

from dora_jax.trainer import alarm


def _rings(values):
  watch = alarm.TrendAlarm()
  return [step for step, value in enumerate(values) if watch.note(value)]


def test_growth_that_no_threshold_sees_rings_once():
  values = [1e-4 * 1.05**step for step in range(100)]
  # Medians 20 steps apart differ by 1.05^20 = 2.7, 23 apart by 3.07.
  assert _rings(values) == [42]


def test_spikes_and_noise_do_not_ring():
  values = [1e-3 * (1 + step % 3) for step in range(100)]
  values[70:78] = [1.0] * 8
  assert _rings(values) == []


def test_the_log_names_the_worst_trajectory(caplog):
  watch = alarm.TrendAlarm()
  for step in range(60):
    metrics = {"worst_group_id": 7.0, "worst_member": 2.0}
    alarm.watch_mismatch(watch, metrics)  # A step without fresh tokens.
    metrics["mismatch_kl_k3"] = 1e-4 * 2.0 ** (step / 5)
    alarm.watch_mismatch(watch, metrics)
  assert caplog.text.count("Worst is group 7, member 2") == 1
