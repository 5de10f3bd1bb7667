"""Checks a run's config before anything is allocated.

The fields and their defaults are in configs/common.py. Whatever two fields must
agree on is checked here, once; the stages may then rely on it. What a name
stands for only its stage knows: runtime/pieces.py checks schedule, objective
and advantage where it makes them, which is before anything is allocated too.
"""

import difflib
import importlib.util
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from ml_collections import config_dict

# A ConfigDict; pyright cannot type its fields.
Config = Any

_LARGEST = 2**31 - 1
# Characters of a value in a message; the rest is told by its length.
_LONGEST_SHOWN = 200
_CHOICES: dict[str, tuple[str, ...]] = {
  "model.source": ("random", "huggingface"),
  "model.compute_dtype": ("float32", "bfloat16"),
  "tokenizer.kind": ("char", "huggingface"),
  "task.source": ("reasoning_gym", "jsonl", "parquet", "sums", "reversal"),
  "task.on_long_prompt": ("skip", "error"),
  "generator.attention": ("auto", "xla", "tpu", "gpu"),
  "generator.dtype": ("float32", "bfloat16"),
  "generator.weights_dtype": ("same", "int8"),
  "generator.kv_dtype": ("same", "int8"),
  "trainer.attention": ("auto", "xla", "tpu", "gpu"),
  "trainer.lora_publish": ("merged", "adapter"),
  "trainer.optimizer": ("adamw", "muon", "adafactor"),
  "trainer.schedule": ("constant", "linear", "cosine"),
}
# One name a line would take a page.
# fmt: off
# By the least value with which something could run.
_FROM_ZERO = (
  "seed", "task.seed", "trainer.b1", "trainer.b2",
  "task.size", "task.num_heldout", "task.num_epochs", "cold_start.steps",
  "mesh.host_devices", "generator.num_pages", "coordinator.max_staleness",
  "coordinator.num_steps", "coordinator.balance_period_s",
  "coordinator.reuse_ratio",
  "generator.top_k", "generator.repeated_tokens",
  "trainer.lora_rank", "trainer.warmup_steps", "trainer.momentum",
  "trainer.ema_decay", "trainer.weight_decay",
  "trainer.weight_floor", "trainer.sequence_floor", "trainer.trace_decay",
  "trainer.kl_coefficient", "trainer.entropy_coefficient",
  "trainer.overlong_penalty", "evaluation.every_steps",
  "evaluation.num_prompts", "checkpoint.every_steps",
  "checkpoint.keep_every_steps", "task.reward_retries", "runtime.give_up_s",
)
_FROM_ONE = (
  "task.max_prompt_tokens", "task.reward_workers", "cold_start.batch_size",
  "mesh.trainer_fsdp", "mesh.trainer_sequence", "mesh.trainer_tensor",
  "mesh.num_generators", "mesh.generator_tensor", "mesh.lanes",
  "generator.slots",
  "generator.page_size", "generator.max_new_tokens", "generator.prefill_chunk",
  "generator.chunk_steps",
  "coordinator.prompts_per_batch", "coordinator.group_size",
  "coordinator.oversample", "coordinator.filter_patience",
  "coordinator.max_uses",
  "trainer.row_length", "trainer.rows_per_batch", "trainer.logprob_chunk",
  "trainer.pass_k", "trainer.overlong_buffer", "trainer.critic_updates",
  "evaluation.samples_per_prompt", "checkpoint.max_to_keep",
)
# Used where the shape is not a checkpoint's.
_SHAPE_FROM_ONE = (
  "model.width", "model.mlp_width", "model.num_layers", "model.num_heads",
  "model.num_kv_heads", "model.head_width",
)
_BELOW_ONE = (
  "trainer.b1", "trainer.b2", "trainer.momentum", "trainer.ema_decay",
)
_AT_MOST_ONE = ("trainer.discount", "trainer.trace_decay")
_ABOVE_ZERO = (
  "task.reward_timeout_s", "task.reward_memory_gib", "cold_start.lr",
  "generator.temperature", "coordinator.kv_pressure",
  "model.rope_theta", "model.norm_eps",
  "trainer.lr", "trainer.lora_alpha", "trainer.critic_lr", "trainer.discount",
  "trainer.value_clip", "trainer.eps", "trainer.clip_norm", "trainer.clip_low",
  "trainer.clip_high", "trainer.clip_loss", "trainer.divergence",
  "trainer.weight_cap", "trainer.sequence_cap", "runtime.stall_s",
  "runtime.canary_tolerance",
)
# fmt: on


def load(path: str | pathlib.Path) -> Config:
  """Returns what the file's `get_config()` returns.

  The file imports `configs.common`: the repository's root is on the path.
  """
  if not pathlib.Path(path).is_file():
    raise FileNotFoundError(
      f"There is no file {str(path)!r}: set --config to a config file."
    )
  spec = importlib.util.spec_from_file_location("config_file", path)
  if spec is None or spec.loader is None:
    raise ValueError(f"--config={path} is not a Python file: name a NAME.py.")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


def validate(config: Config, *, num_devices: int) -> None:
  """Raises ValueError for the first thing that could not run.

  Args:
    config: with every field of configs/common.py.
    num_devices: that JAX has, those of mesh.host_devices included.
  """
  _check_values(config)
  _check_sources(config)
  _check_devices(config, num_devices=num_devices)
  if config.model.source == "random":
    _check_at_least(config, _SHAPE_FROM_ONE, 1)
    check_heads(
      config,
      num_heads=config.model.num_heads,
      num_kv_heads=config.model.num_kv_heads,
    )
  _check_lengths(config)
  _check_sampling(config)
  _check_evaluation(config)


def rollout_groups(config: Config) -> int | None:
  """Groups to keep in flight; None where the schedule finds it ("auto")."""
  return _count_or_auto(config, "coordinator.rollout_groups", 1)


def chunks_ahead(config: Config) -> int | None:
  """Chunks under way while one is read; None where the device says ("auto")."""
  return _count_or_auto(config, "generator.chunks_ahead", 0)


def _count_or_auto(config: Config, field: str, least: int) -> int | None:
  """The count, which arrives as text on the command line; None for "auto"."""
  value = _get(config, field)
  if value == "auto":
    return None
  if not re.fullmatch(r"[0-9]+", str(value)) or int(value) < least:
    raise _wrong(config, field, f'"auto" or a number of at least {least}')
  return int(value)


def check_heads(config: Config, *, num_heads: int, num_kv_heads: int) -> None:
  """Raises ValueError where heads cannot be shared out evenly.

  Args:
    config: for the meshes.
    num_heads: query heads of the model, wherever its shape comes from.
    num_kv_heads: key and value heads.
  """
  if num_heads % num_kv_heads:
    raise ValueError(
      f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly: "
      "make config.model.num_heads a multiple of config.model.num_kv_heads."
    )
  size = config.mesh.trainer_tensor
  if num_kv_heads % size:
    raise ValueError(
      f"{num_kv_heads} KV heads cannot be shared by {size} devices: make "
      "config.mesh.trainer_tensor divide config.model.num_kv_heads."
    )
  # A generator repeats KV heads, each for a part of its query heads.
  size = config.mesh.generator_tensor
  copies = size // math.gcd(num_kv_heads, size)
  num_queries = num_heads // num_kv_heads
  if num_queries % copies:
    raise ValueError(
      f"{num_kv_heads} KV heads on {size} devices must be there {copies} times "
      f"each, but the {num_queries} query heads of each cannot be split in as "
      "many parts: make config.mesh.generator_tensor divide "
      "config.model.num_kv_heads."
    )


def explain_unknown(
  argv: Sequence[str], config: Config, *, fields_in: str = "configs/common.py"
) -> str | None:
  """What is wrong with the first `--config.FIELD` that does not exist.

  ml_collections refuses such a flag too, but as a traceback, and it looks for
  the nearest name in the same section only.

  Args:
    argv: of the process; other arguments are passed over.
    config: as its file gives it, before any flag.
    fields_in: the file that holds every field.

  Returns:
    One sentence with the nearest name, or None where all fields exist.
  """
  fields = _field_names(config)
  for argument in argv:
    match = re.match(r"--?(?:no)?config\.([^=\[]+)", argument)
    if match is None or match[1] in fields:
      continue
    nearest = _nearest(match[1], fields)
    hint = f": did you mean config.{nearest}?" if nearest else "."
    return (
      f"config.{match[1]} does not exist{hint} All fields are in {fields_in}."
    )
  return None


def _check_values(config: Config) -> None:
  for field, choices in _CHOICES.items():
    if _get(config, field) not in choices:
      raise _wrong(config, field, "one of " + ", ".join(map(repr, choices)))
  _check_at_least(config, _FROM_ZERO, 0)
  _check_at_least(config, _FROM_ONE, 1)
  for field in _ABOVE_ZERO:
    # Said so that NaN fails too.
    if not _get(config, field) > 0:
      raise _wrong(config, field, "above 0")
  for field in _BELOW_ONE:
    if not _get(config, field) < 1:
      raise _wrong(config, field, "below 1")
  for field in _AT_MOST_ONE:
    if not _get(config, field) <= 1:
      raise _wrong(config, field, "at most 1")
  if config.trainer.lora_publish == "adapter" and not config.trainer.lora_rank:
    raise _wrong(
      config,
      "trainer.lora_publish",
      '"merged" where there are no adapters, as config.trainer.lora_rank is 0',
    )
  rollout_groups(config)
  chunks_ahead(config)
  for field in sorted(_field_names(config)):
    _check_number(config, field)


def _check_number(config: Config, field: str) -> None:
  """Numbers that arrays, clocks and seeds cannot take fail far from here."""
  value = _get(config, field)
  if isinstance(value, float) and not math.isfinite(value):
    raise _wrong(config, field, "a finite number")
  is_count = isinstance(value, int) and not isinstance(value, bool)
  if is_count and abs(value) > _LARGEST:
    raise _wrong(config, field, f"at most {_LARGEST}")


def _check_at_least(config: Config, fields: Sequence[str], least: int) -> None:
  for field in fields:
    if _get(config, field) < least:
      raise _wrong(config, field, f"at least {least}")


def _check_sources(config: Config) -> None:
  needed = {
    "huggingface model": ("model.folder", config.model.source),
    "huggingface tokenizer": ("tokenizer.folder", config.tokenizer.kind),
    "char tokenizer": ("tokenizer.alphabet", config.tokenizer.kind),
    "reasoning_gym task": ("task.name", config.task.source),
    "jsonl task": ("task.path", config.task.source),
    "parquet task": ("task.path", config.task.source),
  }
  for user, (field, chosen) in needed.items():
    if user.split()[0] == chosen and not _get(config, field):
      raise _wrong(config, field, f"given, for there is a {user}")
  if not all(_is_id(token) for token in config.tokenizer.stop_ids):
    raise _wrong(config, "tokenizer.stop_ids", "a tuple of token ids")
  if config.tokenizer.stop_ids and config.tokenizer.kind == "char":
    raise _wrong(
      config,
      "tokenizer.stop_ids",
      'empty where config.tokenizer.kind is "char"',
    )
  if config.task.chat and config.tokenizer.kind == "char":
    raise _wrong(
      config, "task.chat", 'False where config.tokenizer.kind is "char"'
    )


def _is_id(token: Any) -> bool:
  return isinstance(token, int) and not isinstance(token, bool) and token >= 0


def _check_devices(config: Config, *, num_devices: int) -> None:
  mesh = config.mesh
  num_trainer = mesh.trainer_fsdp * mesh.trainer_sequence * mesh.trainer_tensor
  num_generators = mesh.num_generators * mesh.generator_tensor
  needed = num_trainer if mesh.colocated else num_trainer + num_generators
  if needed > num_devices:
    raise ValueError(
      f"The meshes need {needed} devices (trainer {num_trainer}, generators "
      f"{num_generators}, config.mesh.colocated {mesh.colocated}) but there "
      f"are {num_devices}: lower config.mesh.num_generators, "
      "config.mesh.generator_tensor, config.mesh.trainer_fsdp, "
      "config.mesh.trainer_sequence or config.mesh.trainer_tensor, or on CPU "
      "raise config.mesh.host_devices."
    )
  if mesh.colocated and num_trainer % mesh.generator_tensor:
    raise _wrong(
      config,
      "mesh.generator_tensor",
      f"a divisor of the trainer's {num_trainer} devices, as "
      "config.mesh.colocated is True",
    )
  if config.trainer.rows_per_batch % mesh.trainer_fsdp:
    raise _wrong(
      config,
      "trainer.rows_per_batch",
      f"a multiple of config.mesh.trainer_fsdp, {mesh.trainer_fsdp}",
    )
  if config.trainer.row_length % mesh.trainer_sequence:
    raise _wrong(
      config,
      "trainer.row_length",
      f"a multiple of config.mesh.trainer_sequence, {mesh.trainer_sequence}",
    )


def _check_lengths(config: Config) -> None:
  generator = config.generator
  longest = config.task.max_prompt_tokens + generator.max_new_tokens
  if longest > generator.max_length:
    raise _wrong(
      config,
      "generator.max_length",
      f"at least {longest}, config.task.max_prompt_tokens "
      f"{config.task.max_prompt_tokens} and config.generator.max_new_tokens "
      f"{generator.max_new_tokens} together",
    )
  if config.trainer.row_length < generator.max_length:
    raise _wrong(
      config,
      "trainer.row_length",
      f"at least config.generator.max_length, {generator.max_length}",
    )
  if generator.prefill_chunk < generator.page_size:
    raise _wrong(
      config,
      "generator.prefill_chunk",
      f"at least config.generator.page_size, {generator.page_size}",
    )
  if not 0 < generator.memory_share <= 1:
    raise _wrong(config, "generator.memory_share", "above 0 and at most 1")
  pages = -(-generator.max_length // generator.page_size)
  if 0 < generator.num_pages < pages:
    raise _wrong(
      config,
      "generator.num_pages",
      f"0 or at least {pages}, the pages of one request of "
      f"config.generator.max_length {generator.max_length}",
    )


def _check_sampling(config: Config) -> None:
  generator = config.generator
  if not 0 < generator.top_p <= 1:
    raise _wrong(config, "generator.top_p", "above 0 and at most 1")
  if not 0 <= generator.min_p <= 1:
    raise _wrong(config, "generator.min_p", "from 0 to 1")
  if generator.repetitions < 2:
    raise _wrong(config, "generator.repetitions", "at least 2")
  if not all(s and isinstance(s, str) for s in generator.stop_strings):
    raise _wrong(
      config, "generator.stop_strings", "a tuple of strings that are not empty"
    )
  if config.tokenizer.kind == "char":
    unknown = {*"".join(generator.stop_strings)} - {*config.tokenizer.alphabet}
    if unknown:
      raise _wrong(
        config,
        "generator.stop_strings",
        f"of config.tokenizer.alphabet, which lacks {sorted(unknown)}",
      )


def _check_evaluation(config: Config) -> None:
  evaluation = config.evaluation
  if evaluation.num_prompts > config.task.num_heldout:
    raise _wrong(
      config,
      "evaluation.num_prompts",
      f"at most config.task.num_heldout, {config.task.num_heldout}",
    )
  if not 0 <= config.cold_start.wrong_share < 1:
    raise _wrong(config, "cold_start.wrong_share", "from 0 to below 1")
  if evaluation.temperature < 0:
    raise _wrong(config, "evaluation.temperature", "at least 0")
  if evaluation.temperature == 0 and evaluation.samples_per_prompt > 1:
    raise _wrong(
      config,
      "evaluation.samples_per_prompt",
      "1 where config.evaluation.temperature is 0, for all would be the same",
    )


def _wrong(config: Config, field: str, needed: str) -> ValueError:
  value = _get(config, field)
  shown = repr(value)
  if len(shown) > _LONGEST_SHOWN:
    shown = f"{shown[:_LONGEST_SHOWN]} … ({len(shown)} characters)"
  return ValueError(f"config.{field} is {shown} but must be {needed}.")


def _get(config: Config, field: str) -> Any:
  value = config
  for name in field.split("."):
    value = value[name]
  return value


def _field_names(config: Config) -> set[str]:
  names = set()
  for name, value in config.items(preserve_field_references=True):
    names.add(name)
    if isinstance(value, config_dict.ConfigDict):
      names |= {f"{name}.{inner}" for inner in _field_names(value)}
  return names


def _nearest(name: str, fields: set[str]) -> str | None:
  """The field with this last part; else the most similar one, if any is."""
  ordered = sorted(fields)
  last = name.rpartition(".")[2]
  by_last = {field.rpartition(".")[2]: field for field in ordered}
  same_last = [f for f in ordered if f.rpartition(".")[2] == last]
  close = (
    difflib.get_close_matches(name, same_last, n=1, cutoff=0.0)
    or difflib.get_close_matches(name, ordered, n=1, cutoff=0.8)
    or [by_last[n] for n in difflib.get_close_matches(last, by_last, n=1)]
  )
  return close[0] if close else None
