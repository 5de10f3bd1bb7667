"""Tunix 0.1.7's own sampler, timed on request; runs in its environment.

It imports nothing of this project but what lies beside it. Over stdin come
lines of JSON, over stdout go answers: {"rows": 32} has it sample so many
prompts in one call, and answers with {"seconds": ..., "lengths": [...]}. Its
first answer says that it is ready.
Where completions shall end early, every token below --num_stop_ids ends one,
which random weights draw about equally often.
"""

import argparse
import json
import sys
import time

import numpy as np
import tunix_model
from flax import nnx
from tunix.generate import sampler as sampler_lib
from tunix.models.qwen3 import model as qwen3

_PAD, _BOS, _FIRST_STOP = 0, 1, 2


class _Tokenizer:
  """A word is the number of a token."""

  def encode(self, text, **_):
    return [int(word) for word in text.split()]

  def decode(self, token_ids, **_):
    return " ".join(str(int(token)) for token in token_ids)

  def pad_id(self):
    return _PAD

  def bos_id(self):
    return _BOS

  def eos_id(self):
    return _FIRST_STOP


def main() -> None:
  """Answers until stdin ends."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--shape", type=json.loads, required=True)
  parser.add_argument("--prompt_tokens", type=int, required=True)
  parser.add_argument("--limit", type=int, required=True)
  parser.add_argument("--num_stop_ids", type=int, required=True)
  args = parser.parse_args()
  config = tunix_model.make_config(args.shape)
  model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
  sampler = sampler_lib.Sampler(
    model,
    _Tokenizer(),
    sampler_lib.CacheConfig(
      cache_size=args.prompt_tokens + args.limit + 16,
      num_layers=config.num_layers,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.head_dim,
    ),
  )
  stop_ids = list(range(_FIRST_STOP, _FIRST_STOP + args.num_stop_ids))
  rng = np.random.default_rng(0)
  tunix_model.tell_size(model)
  for seed, line in enumerate(sys.stdin):
    # Prompts avoid the stop tokens; it adds a beginning token itself.
    words = rng.integers(
      args.shape["vocab_size"] // 2,
      args.shape["vocab_size"],
      (json.loads(line)["rows"], args.prompt_tokens - 1),
    )
    prompts = [" ".join(map(str, row)) for row in words]
    start_s = time.perf_counter()
    out = sampler(
      prompts,
      max_generation_steps=args.limit,
      max_prompt_length=args.prompt_tokens,
      eos_tokens=stop_ids or [-1],
      temperature=1.0,
      top_p=1.0,
      seed=seed,
    )
    lengths = [len(row) for row in out.tokens]
    seconds = time.perf_counter() - start_s
    print(json.dumps({"seconds": seconds, "lengths": lengths}), flush=True)


if __name__ == "__main__":
  main()
