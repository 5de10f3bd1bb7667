"""transformers' generate on torch's CPU build, timed on request.

It imports nothing of this project. Over stdin come lines of JSON, over stdout
go answers: {"lengths": [...]} has it continue as many prompts in one call, each
to its length, and answers with {"seconds": ...}. Its first answer says that it
is ready.
"""

import argparse
import json
import sys
import time

import torch
import transformers


class _Lengths(transformers.StoppingCriteria):
  """Ends each row at a length of its own."""

  def __init__(self, lengths):
    self._lengths = torch.tensor(lengths)

  def __call__(self, input_ids, scores, **_):
    del scores
    return input_ids.shape[1] >= self._lengths


def main() -> None:
  """Answers until stdin ends."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--shape", type=json.loads, required=True)
  parser.add_argument("--prompt_tokens", type=int, required=True)
  args = parser.parse_args()
  shape = args.shape
  config = transformers.LlamaConfig(
    vocab_size=shape["vocab_size"],
    hidden_size=shape["width"],
    intermediate_size=shape["mlp_width"],
    num_hidden_layers=shape["num_layers"],
    num_attention_heads=shape["num_heads"],
    num_key_value_heads=shape["num_kv_heads"],
    head_dim=shape["head_width"],
    tie_word_embeddings=True,
    max_position_embeddings=2048,
    pad_token_id=0,
    eos_token_id=None,
    bos_token_id=None,
  )
  torch.manual_seed(0)
  model = transformers.LlamaForCausalLM(config).eval()
  num_params = sum(p.numel() for p in model.parameters())
  print(json.dumps({"num_params": num_params}), flush=True)
  for line in sys.stdin:
    lengths = json.loads(line)["lengths"]
    prompts = torch.randint(
      1, shape["vocab_size"], (len(lengths), args.prompt_tokens)
    )
    ends = _Lengths([args.prompt_tokens + length for length in lengths])
    start_s = time.perf_counter()
    with torch.inference_mode():
      out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=max(lengths),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        stopping_criteria=transformers.StoppingCriteriaList([ends]),
      )
    seconds = time.perf_counter() - start_s
    num_new = out.shape[1] - args.prompt_tokens
    assert num_new == max(lengths), (num_new, max(lengths))
    print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
  main()
