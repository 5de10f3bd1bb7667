"""Tunix 0.1.7's own GRPO train step, timed on request; in its environment.

It imports nothing of this project but what lies beside it. Over stdin come
lines of JSON, over stdout go answers: {"prompts": [[...], ...],
"completions": [[...], ...]} has it make one update on these token ids, and
answers with {"seconds": ..., "cpu_seconds": ...}. Its first answer says that it
is ready.

What is timed is the jitted train step of its trainer on a batch that lies
ready, as its learner makes it: prompts padded on the left, completions on the
right. With --packed_tokens above 0 its own packing makes rows of so many tokens
of the batch beforehand, and one update takes their mean gradient.
"""

import argparse
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tunix_model
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import algo_core, common, trainer, utils
from tunix.rl.grpo import grpo_learner
from tunix.sft import peft_trainer

_PAD, _STOP = 0, 1


def main() -> None:
  """Answers until stdin ends."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--shape", type=json.loads, required=True)
  parser.add_argument("--prompt_tokens", type=int, required=True)
  parser.add_argument("--limit", type=int, required=True)
  parser.add_argument("--packed_tokens", type=int, required=True)
  parser.add_argument("--num_rows", type=int, required=True)
  args = parser.parse_args()
  model = qwen3.Qwen3(tunix_model.make_config(args.shape), rngs=nnx.Rngs(0))
  peer = _make_trainer(model, args.num_rows if args.packed_tokens else None)
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")
  )
  with mesh:
    step, _ = peer.jit_train_and_eval_step()
    tunix_model.tell_size(model)
    for line in sys.stdin:
      print(
        json.dumps(_answer(json.loads(line), step, model, args)), flush=True
      )


def _make_trainer(model, num_accumulated):
  """GRPO without a KL, as Tunix's own learner sets it up."""
  algorithm = grpo_learner.GRPOConfig(num_generations=4, beta=0.0)
  algorithm.temperature = 1.0
  peer = trainer.Trainer(
    model,
    optax.adamw(1e-6),
    peft_trainer.TrainingConfig(
      eval_every_n_steps=10**9, gradient_accumulation_steps=num_accumulated
    ),
    custom_checkpoint_metadata_fn=dict,
  )
  peer.with_loss_fn(
    lambda model, train_example: algo_core.grpo_loss_fn(
      model,
      train_example,
      algo_config=algorithm,
      pad_id=_PAD,
      eos_id=_STOP,
    ),
    has_aux=True,
  )
  peer.with_gen_model_input_fn(lambda batch: {"train_example": batch})
  return peer


def _answer(question, step, model, args):
  """Times a step of what is asked."""
  batch = _pad(question["prompts"], question["completions"], args)
  batches = [batch]
  if args.packed_tokens:
    packed = utils.pack_sequences(iter([[batch]]), args.packed_tokens, _PAD)
    batches = [each for several in packed for each in several]
    assert len(batches) == args.num_rows, (len(batches), args.num_rows)
  jax.block_until_ready(batches)
  start_s, start_cpu_s = time.perf_counter(), time.process_time()
  for each in batches:
    out = step(each)
  jax.block_until_ready((out, nnx.state(model)))
  return {
    "seconds": time.perf_counter() - start_s,
    "cpu_seconds": time.process_time() - start_cpu_s,
    "loss": float(out[0]),
    "rows": len(batches),
  }


def _pad(prompts, completions, args) -> common.TrainExample:
  """As the learner pads them."""
  num = len(prompts)
  prompt_ids = np.full((num, args.prompt_tokens), _PAD, np.int32)
  completion_ids = np.full((num, args.limit), _PAD, np.int32)
  for row, (prompt, completion) in enumerate(
    zip(prompts, completions, strict=True)
  ):
    prompt_ids[row, args.prompt_tokens - len(prompt) :] = prompt
    completion_ids[row, : len(completion)] = completion
  advantages = np.where(np.arange(num) % 2, 1.0, -1.0)
  return common.TrainExample(
    prompt_ids=jnp.asarray(prompt_ids),
    prompt_mask=jnp.asarray(prompt_ids != _PAD),
    completion_ids=jnp.asarray(completion_ids),
    completion_mask=jnp.asarray((completion_ids != _PAD).astype(np.int32)),
    advantages=jnp.asarray(advantages, jnp.float32),
    ref_per_token_logps=None,
    old_per_token_logps=None,
  )


if __name__ == "__main__":
  main()
