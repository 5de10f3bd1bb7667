"""What a config's schedule is made of, and what it is refused for."""

import pytest

from dora_jax.coordinator.schedules import registry
from dora_jax.runtime import pieces
from tests.runtime import tiny


@pytest.mark.parametrize("name", registry.NAMES)
def test_every_schedule_is_made_by_its_name(name):
  config = tiny.config(
    coordinator__schedule=name,
    coordinator__max_staleness=3,
    coordinator__rollout_groups="5",
  )
  schedule = pieces.make_schedule(config)
  assert type(schedule).__name__.lower() == name.replace("_", "")
  bounds = {"sync": 0, "replication": 0, "one_step_off": 1}
  assert schedule.max_staleness == bounds.get(name, 3)
  assert schedule.mixes_versions == (name == "partial_rollout")


def test_an_unknown_schedule_is_refused_with_those_there_are():
  config = tiny.config(coordinator__schedule="dorra")
  with pytest.raises(
    ValueError, match=r"'dorra': config\.coordinator\.schedule .*'sync', .*dora"
  ):
    pieces.make_schedule(config)


_PARTIAL = {"coordinator__schedule": "partial_rollout"}
_RECOMPUTED = {"trainer__proximal": "recomputed"}

# What to change, and what the message must name: value found, value needed,
# field to change.
_WRONG = [
  ({"trainer__loss": "ppo"}, ["loss is 'ppo'", "'ppo_clip'"]),
  ({"trainer__advantage": "grop"}, ["advantage is 'grop'", "'grpo'"]),
  ({"coordinator__group_size": 1}, ["group_size is 1", "least 2", "'grpo'"]),
  (
    {"trainer__advantage": "pass_at_k", "trainer__pass_k": 5},
    ["pass_k is 5", "1 to config.coordinator.group_size, 4"],
  ),
  (
    {"trainer__advantage": "gae", "trainer__loss": "vtrace"},
    ["advantage is 'gae'", 'loss "vtrace"', 'loss to "aipo"'],
  ),
  (
    {"trainer__lora_rank": 4, "trainer__lora_targets": ("q_proj",)},
    ["lora_targets is ('q_proj',)", "'query'"],
  ),
  (
    {"coordinator__reuse_ratio": 0.5, "coordinator__schedule": "sync"},
    ["reuse_ratio is 0.5", "0 versions old", "max_staleness to 1"],
  ),
  (_PARTIAL, ["proximal is 'behavior'", "'current' or 'loglinear'"]),
  (
    {"trainer__loss": "reinforce"},
    ["1 versions old", "loss 'reinforce'", "max_staleness to 0"],
  ),
  # Its clip is inert, for the ratio is always 1.
  ({"trainer__proximal": "current"}, ["1 versions old", "correction 'none'"]),
  ({"trainer__correction": "tis"}, ["correction is 'tis'", "nothing to"]),
  (_RECOMPUTED, ["recompute_logprobs is False but must be True"]),
  ({"trainer__weight_cap": 0.5}, ["weight_cap 0.5", "1 must lie between"]),
  ({"trainer__sequence_cap": 0.999}, ["sequence_cap 0.999", "between them"]),
  (
    {"trainer__loss": "dual_clip", "trainer__clip_loss": 1.1},
    ["clip_loss is 1.1", "above 1 + clip_high, 1.2"],
  ),
]


@pytest.mark.parametrize(
  ("fields", "named"), _WRONG, ids=[",".join(f) for f, _ in _WRONG]
)
def test_objectives_that_make_no_sense_are_refused(fields, named):
  config = tiny.config(**fields)
  with pytest.raises(ValueError) as caught:
    pieces.make_objective(config)
    pieces.make_advantage(config)
    pieces.make_adapters(config)
    pieces.make_reuse(config)
  for part in named:
    assert part in str(caught.value)


def test_truncated_sampling_needs_a_correction():
  config = tiny.config(generator__top_p=0.9)
  with pytest.raises(ValueError, match=r"config\.generator\.top_k, top_p"):
    pieces.make_objective(config)
  pieces.make_objective(tiny.config(generator__top_p=1.0))
  corrected = {"trainer__proximal": "current", "trainer__correction": "tis"}
  pieces.make_objective(tiny.config(generator__top_p=0.9, **corrected))


@pytest.mark.parametrize(
  "fields",
  [
    {"trainer__loss": "reinforce", "coordinator__schedule": "sync"},
    {**_PARTIAL, "trainer__proximal": "loglinear"},
    {
      **_RECOMPUTED,
      "trainer__recompute_logprobs": True,
      "trainer__loss": "dual_clip",
      "trainer__correction": "tis",
    },
  ],
  ids=str,
)
def test_objectives_that_make_sense_are_made(fields):
  config = tiny.config(**fields)
  made = pieces.make_objective(config)
  assert made.loss == config.trainer.loss
  assert made.constant_length == config.generator.max_new_tokens
