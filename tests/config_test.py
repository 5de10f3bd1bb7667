"""A config that could not run is refused by name, before anything is made."""

import pathlib

import pytest

from configs import common
from dora_jax import config as config_lib

_ROOT = pathlib.Path(__file__).parents[1]


def _changed(**fields) -> config_lib.Config:
  config: config_lib.Config = common.get_config()
  for name, value in fields.items():
    section, field = name.split("__")
    config[section][field] = value
  return config


def test_the_defaults_are_valid_and_locked():
  config = config_lib.load(_ROOT / "configs" / "common.py")
  config_lib.validate(config, num_devices=2)
  assert config == common.get_config()
  with pytest.raises(AttributeError, match='"lr" instead of "lrr"'):
    config.trainer.lrr = 1.0
  config.task.params.max_term = 9  # the one open section


@pytest.mark.parametrize(
  "path",
  sorted((_ROOT / "configs").glob("*.py")),
  ids=lambda path: path.stem,
)
def test_every_config_file_is_valid(path):
  config_lib.validate(config_lib.load(path), num_devices=64)


# Fields to change; then what the message must name: value found, value needed,
# field to change.
_WRONG = [
  ({"trainer__clip_low": 0.0}, ["clip_low is 0.0", "above 0"]),
  ({"coordinator__rollout_groups": "many"}, ["'many'", '"auto" or a number']),
  ({"mesh__num_generators": 9}, ["10 devices", "are 8", "num_generators"]),
  (
    {"mesh__colocated": True, "mesh__generator_tensor": 2},
    ["generator_tensor is 2", "trainer's 1 devices"],
  ),
  (
    {"mesh__generator_tensor": 3},
    ["2 KV heads", "3 devices", "config.mesh.generator_tensor"],
  ),
  (
    {"mesh__trainer_tensor": 4},
    ["2 KV heads", "4 devices", "config.mesh.trainer_tensor"],
  ),
  ({"model__num_heads": 3}, ["3 query heads", "2 KV heads", "num_heads"]),
  ({"model__num_layers": 0}, ["num_layers is 0", "at least 1"]),
  ({"model__source": "huggingface"}, ["config.model.folder is ''"]),
  ({"tokenizer__alphabet": ""}, ["config.tokenizer.alphabet is ''"]),
  ({"task__source": "parquet"}, ["config.task.path is ''", "parquet"]),
  ({"task__source": "reasoning_gym"}, ["config.task.name is ''"]),
  ({"task__chat": True}, ["config.task.chat is True", "char"]),
  (
    {"mesh__trainer_fsdp": 3},
    ["rows_per_batch is 8", "multiple of config.mesh.trainer_fsdp, 3"],
  ),
  (
    {"mesh__trainer_sequence": 3},
    ["row_length is 64", "multiple of config.mesh.trainer_sequence, 3"],
  ),
  ({"mesh__trainer_sequence": 8}, ["9 devices", "config.mesh.trainer_seq"]),
  (
    {"generator__max_new_tokens": 33},
    ["max_length is 64", "at least 65", "max_prompt_tokens 32", "33"],
  ),
  ({"trainer__row_length": 63}, ["row_length is 63", "max_length, 64"]),
  (
    {"generator__num_pages": 3, "generator__page_size": 16},
    ["num_pages is 3", "at least 4"],
  ),
  ({"generator__memory_share": 1.5}, ["memory_share is 1.5", "at most 1"]),
  ({"generator__prefill_chunk": 8}, ["prefill_chunk is 8", "page_size, 64"]),
  ({"generator__temperature": 0.0}, ["temperature is 0.0", "above 0"]),
  ({"generator__top_k": -1}, ["top_k is -1", "at least 0"]),
  ({"generator__top_p": 0.0}, ["top_p is 0.0", "above 0 and at most 1"]),
  ({"generator__min_p": 1.01}, ["min_p is 1.01", "from 0 to 1"]),
  ({"generator__stop_strings": ("",)}, ["stop_strings is ('',)", "not empty"]),
  (
    {"generator__stop_strings": ("=", "a+b")},
    ["stop_strings is ('=', 'a+b')", "alphabet, which lacks ['a', 'b']"],
  ),
  ({"generator__repetitions": 1}, ["repetitions is 1", "at least 2"]),
  ({"trainer__lr": float("nan")}, ["lr is nan", "above 0"]),
  ({"trainer__ema_decay": 1.0}, ["ema_decay is 1.0", "below 1"]),
  ({"trainer__trace_decay": 1.5}, ["trace_decay is 1.5", "at most 1"]),
  ({"evaluation__num_prompts": 4}, ["num_prompts is 4", "num_heldout, 0"]),
  (
    {"evaluation__samples_per_prompt": 4},
    ["samples_per_prompt is 4", "temperature is 0"],
  ),
]


@pytest.mark.parametrize(
  ("fields", "named"), _WRONG, ids=[",".join(f) for f, _ in _WRONG]
)
def test_what_cannot_run_is_refused_by_name(fields, named):
  with pytest.raises(ValueError) as caught:
    config_lib.validate(_changed(**fields), num_devices=8)
  for part in named:
    assert part in str(caught.value)


def test_meshes_that_fit_exactly_pass():
  config = _changed(mesh__num_generators=3, mesh__generator_tensor=2)
  config_lib.validate(config, num_devices=7)
  with pytest.raises(ValueError, match="need 7 devices"):
    config_lib.validate(config, num_devices=6)
  config.mesh.colocated = True
  config.mesh.trainer_tensor = 2
  config_lib.validate(config, num_devices=2)


def test_a_generator_may_have_more_devices_than_kv_heads():
  config = _changed(mesh__generator_tensor=4)  # each of 2 KV heads on two
  config_lib.validate(config, num_devices=5)
  config.model.num_heads = 6
  with pytest.raises(ValueError, match=r"2 KV heads on 4 .* the 3 query heads"):
    config_lib.validate(config, num_devices=5)


def test_the_heads_of_a_checkpoint_are_checked_when_its_shape_is_known():
  config = _changed(model__source="huggingface", mesh__generator_tensor=4)
  config.model.folder = "smollm2"
  config_lib.validate(config, num_devices=8)  # its shape is not known yet
  with pytest.raises(ValueError, match=r"3 KV heads .* 4 devices"):
    config_lib.check_heads(config, num_heads=9, num_kv_heads=3)


@pytest.mark.parametrize(
  ("value", "expected"), [("auto", None), ("12", 12), ("1", 1)]
)
def test_rollout_groups_are_a_number_or_auto(value, expected):
  config = _changed(coordinator__rollout_groups=value)
  assert config_lib.rollout_groups(config) == expected


@pytest.mark.parametrize(
  ("argument", "nearest"),
  [
    ("--config.trainer.lrr=1", "config.trainer.lr?"),
    ("--config.trainr.lr=1", "config.trainer.lr?"),
    ("-config.generator.lr=1", "config.trainer.lr?"),
    ("--config.max_stalenes=1", "config.coordinator.max_staleness?"),
    ("--noconfig.trainer.rematt", "config.trainer.remat?"),
    ("--config.qqqqqq=1", None),
  ],
)
def test_an_unknown_field_is_answered_with_the_nearest(argument, nearest):
  argv = [
    "main.py",
    "--config=c.py",
    "--config.seed=3",
    argument,
    "--workdir=w",
  ]
  message = config_lib.explain_unknown(argv, common.get_config())
  assert message is not None and "does not exist" in message
  assert ("did you mean" in message) == (nearest is not None)
  assert nearest is None or f"did you mean {nearest}" in message


def test_known_fields_need_no_explanation():
  config: config_lib.Config = common.get_config()
  config.task.params.max_term = 9
  argv = [
    "--config=configs/common.py",
    "--config.trainer.lr=1e-3",
    "--config.task.params.max_term=4",
    "--config.tokenizer.stop_ids[0]=1",
    "--noconfig.trainer.remat",
    "--configs=x",
  ]
  assert config_lib.explain_unknown(argv, config) is None
