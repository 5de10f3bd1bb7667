"""Seconds of decoding: against single steps, and against each other."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_jax.simulator import costs, hardware, models, roofline
from tests.simulator import small


@given(
  num_live=st.integers(1, 300),
  context=st.integers(0, 50_000),
  num_steps=st.integers(1, 400),
  flops=st.sampled_from([0.0, 1e-5, 1e-3]),
  kv_flops=st.sampled_from([0.0, 1e-7, 1e-5]),
)
def test_decode_is_the_sum_of_its_steps(
  num_live, context, num_steps, flops, kv_flops
):
  cost = small.make_costs(
    kv_token_read_s=1e-6, request_flops_s=flops, kv_token_flops_s=kv_flops
  )
  # A step's seconds hold all along it: so the middle of each is summed.
  one_by_one = sum(
    cost.step_fixed_s
    + max(
      cost.weights_read_s + 1e-6 * (context + num_live * (step + 0.5)),
      num_live * flops + kv_flops * (context + num_live * (step + 0.5)),
    )
    for step in range(num_steps)
  )
  seconds = cost.decode_s(num_live, float(context), float(num_steps))
  assert seconds == pytest.approx(one_by_one, rel=2e-3)
  steps = cost.decode_steps(num_live, float(context), seconds)
  assert steps == pytest.approx(num_steps, rel=1e-9)


def test_roofline_of_32b_by_hand():
  cost = roofline.make_costs(
    size=models.find("qwen2.5-32b"),
    accelerator=hardware.find("H800"),
    efficiencies=roofline.Efficiencies(
      bandwidth=0.5,
      flops=0.5,
      training=0.25,
      link=0.5,
      imbalance=1.0,
      step_fixed_s=0.005,
      train_fixed_s=0.0,
      switch_fixed_s=0.0,
      move_fixed_s=0.0,
      message_s=0.0,
    ),
    generator_devices=4,
    trainer_devices=64,
    number_bytes=2.0,
    num_logprob_passes=1.0,
  )
  # 65.52 GB of weights over four devices of 3.35 TB/s, half of it reached.
  assert cost.weights_read_s == pytest.approx(65.52 / (4 * 3350 * 0.5))
  # 256 KiB of KV a token (dora.md, section 4).
  assert cost.kv_token_read_s == pytest.approx(2**18 / (4 * 3.35e12 * 0.5))
  # (6 + 2) operations a weight and token.
  assert cost.train_token_s == pytest.approx(8 * 32.76e9 / (64 * 989e12 * 0.25))
  # One request alone is bound by memory: 5 ms and the weights.
  step_s = cost.decode_s(1, 0.0, 1.0)
  assert step_s == pytest.approx(0.005 + 65.52 / 6700, rel=1e-3)


def test_experts_are_read_as_far_as_they_are_routed_to():
  cost = small.make_costs(experts_read_s=1.0, expert_share=0.25)
  base_s = cost.step_fixed_s + cost.weights_read_s
  assert cost.decode_s(1, 0.0, 1.0) == pytest.approx(base_s + 0.25)
  assert cost.decode_s(2, 0.0, 1.0) == pytest.approx(base_s + 1 - 0.75**2)


def test_imbalance_of_experts_slows_what_they_do_and_nothing_else():
  even, uneven = (
    roofline.make_costs(
      size=models.find("longcat-flash"),
      accelerator=hardware.find("H800"),
      efficiencies=dataclasses.replace(small.EFFICIENCIES, imbalance=imbalance),
      generator_devices=16,
      trainer_devices=64,
      number_bytes=1.0,
      num_logprob_passes=0.0,
    )
    for imbalance in (1.0, 2.0)
  )
  assert uneven.experts_read_s == pytest.approx(2 * even.experts_read_s)
  assert uneven.weights_read_s == even.weights_read_s
  assert uneven.kv_token_read_s == even.kv_token_read_s
  # 541e9 * 8 / 512 of the 27e9 active weights are experts'.
  share = 541e9 * 8 / 512 / 27e9
  assert uneven.request_flops_s / even.request_flops_s == pytest.approx(
    1 + share
  )


@pytest.mark.parametrize(
  ("change", "message"),
  [({"load_s": -1.0}, "load_s"), ({"train_token_s": float("nan")}, "train")],
)
def test_costs_that_cannot_be_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    small.make_costs(**change)


def test_a_share_above_one_is_refused():
  with pytest.raises(ValueError, match=r"config\.cost\.link"):
    dataclasses.replace(small.EFFICIENCIES, link=1.5)


def test_weights_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match=r"config\.generator\.devices"):
    roofline.kv_capacity(
      size=models.find("qwen2.5-72b"),
      accelerator=hardware.find("H100"),
      generator_devices=1,
      number_bytes=2.0,
      memory_share=0.9,
    )
  assert isinstance(small.make_costs(), costs.Costs)
