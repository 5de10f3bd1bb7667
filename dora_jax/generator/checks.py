"""Refuses, at the boundary, settings and requests that could not be served."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from dora_jax import types
from dora_jax.generator import stopping, verbs
from dora_jax.model import transformer


def check_sizes(
  *,
  mesh: Mesh,
  config: transformer.ModelConfig,
  page_size: int,
  max_length: int,
  prefill_chunk: int,
  chunk_steps: int,
) -> None:
  """Raises where a worker cannot be made with these settings."""
  if mesh.axis_names != ("tensor",):
    raise ValueError(
      f"A generator mesh has the one axis 'tensor', not {mesh.axis_names}."
    )
  tensor = mesh.shape["tensor"]
  if config.num_kv_heads % tensor:
    raise ValueError(
      f"{config.num_kv_heads} KV heads cannot be split over {tensor} devices: "
      "config.mesh.generator_tensor must divide config.model.num_kv_heads."
    )
  if page_size < 1 or chunk_steps < 1:
    raise ValueError(
      f"Page size is {page_size} and a chunk {chunk_steps} steps, but both "
      "must be at least 1: change config.generator.page_size or "
      "config.generator.chunk_steps."
    )
  if prefill_chunk < page_size:
    raise ValueError(
      f"A chunk of prefill has {prefill_chunk} tokens but must fill at least a "
      f"page of {page_size}: raise config.generator.prefill_chunk."
    )
  if not 2 <= max_length <= config.max_positions:
    raise ValueError(
      f"Sequences of up to {max_length} tokens were asked for, but the model "
      f"takes 2 to {config.max_positions}: change config.generator.max_length."
    )


def check_stop_ids(stop_ids: Sequence[int], vocab_size: int) -> None:
  """Raises where a stop token can never be sampled."""
  outside = [token for token in stop_ids if not 0 <= token < vocab_size]
  if outside:
    raise ValueError(
      f"Stop tokens {outside} are outside the vocabulary of {vocab_size} "
      "tokens: change config.tokenizer.stop_ids or config.model.vocab_size."
    )


def check_request(
  request: types.Request,
  *,
  generator_id: int,
  version: int | None,
  max_length: int,
  vocab_size: int,
) -> None:
  """Raises where a lane that serves this version cannot serve the request."""
  name = f"Member {request.member} of group {request.group_id}"
  total = len(request.prompt) + request.max_new_tokens
  if request.version != version:
    raise ValueError(
      f"{name} is of version {request.version} but generator "
      f"{generator_id} serves version {version}."
    )
  if not len(request.prompt):
    raise ValueError(f"{name} has an empty prompt: 1 token is needed.")
  if request.max_new_tokens < 1 or total > max_length:
    raise ValueError(
      f"{name} has {len(request.prompt)} prompt tokens and may sample "
      f"{request.max_new_tokens}, {total} in all; needed are at least 1 to "
      f"sample and at most {max_length} in all: change "
      "config.generator.max_length."
    )
  least, most = int(request.prompt.min()), int(request.prompt.max())
  if least < 0 or most >= vocab_size:
    raise ValueError(
      f"{name} has prompt tokens from {least} to {most}; the model knows 0 "
      f"to {vocab_size - 1}: tokenizer and config.model do not match."
    )
  _check_sampling(request.sampling, name)
  _check_stopping(request.stopping, name, vocab_size)


def _check_sampling(sampling: types.Sampling, name: str) -> None:
  # Each said so that NaN fails too.
  needed = {
    "temperature": (
      "finite and at least 0",
      0 <= sampling.temperature < np.inf,
    ),
    "top_k": ("at least 0", sampling.top_k >= 0),
    "top_p": ("above 0 and at most 1", 0 < sampling.top_p <= 1),
    "min_p": ("from 0 to 1", 0 <= sampling.min_p <= 1),
  }
  for field, (needs, is_met) in needed.items():
    if not is_met:
      raise ValueError(
        f"{name} has {field} {getattr(sampling, field)}; it must be {needs}: "
        f"change config.generator.{field}."
      )


def _check_stopping(rules: types.Stopping, name: str, vocab_size: int) -> None:
  if len(rules.stop_ids) > verbs.MAX_STOP_IDS:
    raise ValueError(
      f"{name} has {len(rules.stop_ids)} stop tokens of its own; there is room "
      f"for {verbs.MAX_STOP_IDS}: what ends every completion belongs into "
      "config.tokenizer.stop_ids."
    )
  check_stop_ids(rules.stop_ids, vocab_size)
  for string in rules.stop_strings:
    if not string or stopping.REPLACEMENT in string:
      raise ValueError(
        f"{name} has the stop string {string!r}; it must not be empty, nor "
        "hold the sign for unreadable bytes: change "
        "config.generator.stop_strings."
      )
  if rules.repeated_tokens < 0 or rules.repetitions < 2:
    raise ValueError(
      f"{name} ends when a run of up to {rules.repeated_tokens} tokens has "
      f"come {rules.repetitions} times; needed are at least 0 tokens and 2 "
      "times: change config.generator.repeated_tokens or "
      "config.generator.repetitions."
    )
