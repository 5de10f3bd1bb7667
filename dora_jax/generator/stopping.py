"""Where a completion ends for what it says, which the device does not look at.

The device stops a slot at stop tokens and at its limit. For stop strings and
repetition the host looks through each chunk and finds the first token that ends
the completion, as if it had looked after every single one: where chunks begin
makes no difference, nor does a move. What was sampled after it is thrown away.

A stop string ends a completion with the first token after which the text of its
last few tokens holds the string. They are as many as the longest string has
bytes, and some more, as every token that leaves a trace gives at least a byte.

Repetition ends it with the first token at which its last n * r tokens are one
run of n tokens r times, for any n up to the longest run that is looked for.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from dora_jax import types

Decode = Callable[[Sequence[int]], str]

# What a decoder writes for bytes that are no character, or not yet.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# So that a decoder's treatment of the beginning of a text, such as taking a
# space away, does not reach the string.
_NUM_CONTEXT = 4


def num_looked_at(stopping: types.Stopping) -> int:
  """Most tokens that decide whether the last of them ends a completion."""
  num_repeated = stopping.repeated_tokens * stopping.repetitions
  return max(num_repeated, _num_decoded(stopping.stop_strings))


def find_end(
  tokens: Int[np.ndarray, "T"],
  *,
  num_new: int,
  stopping: types.Stopping,
  decode: Decode,
) -> tuple[int, types.FinishReason] | None:
  """The first new token that ends a completion, if any does.

  Args:
    tokens: the last ones of the completion: the new ones and, as far as there
      are, num_looked_at - 1 before them.
    num_new: how many have not been looked at.
    stopping: what to look for.
    decode: the text of token ids, as interfaces.Tokenizer has it.

  Returns:
    How many of the new tokens belong to the completion, and why it ends. A stop
    string goes before a repetition that ends with the same token.
  """
  string_end = repetition_end = num_new + 1
  if stopping.stop_strings:
    string_end = _string_end(tokens, num_new, stopping.stop_strings, decode)
  if stopping.repeated_tokens:
    repetition_end = _repetition_end(
      tokens, num_new, stopping.repeated_tokens, stopping.repetitions
    )
  if min(string_end, repetition_end) > num_new:
    return None
  if string_end <= repetition_end:
    return string_end, "stop"
  return repetition_end, "repetition"


def _num_decoded(strings: Sequence[str]) -> int:
  """Tokens whose text is searched; 0 where there are no strings."""
  lengths = [len(string.encode()) for string in strings]
  return max(lengths) + _NUM_CONTEXT if lengths else 0


def _string_end(
  tokens: Int[np.ndarray, "T"],
  num_new: int,
  strings: Sequence[str],
  decode: Decode,
) -> int:
  """New tokens up to the first that completes a string; else one too many."""
  ids = tokens.tolist()
  num_old, num_decoded = len(ids) - num_new, _num_decoded(strings)
  holds_one = lambda text: any(string in text for string in strings)
  text = decode(ids[max(0, num_old + 1 - num_decoded) :])
  # Nearly always the one text tells that there is none. But a character that is
  # not complete yet can make others unreadable that were complete before.
  if not holds_one(text) and REPLACEMENT not in text:
    return num_new + 1
  for count in range(1, num_new + 1):
    end = num_old + count
    if holds_one(decode(ids[max(0, end - num_decoded) : end])):
      return count
  return num_new + 1


def _repetition_end(
  tokens: Int[np.ndarray, "T"], num_new: int, longest: int, times: int
) -> int:
  """New tokens up to the first that completes one; else one too many."""
  num_old = len(tokens) - num_new
  # No token id is negative, so what lies before the first equals none.
  padded = np.concatenate([np.full(longest, -1, tokens.dtype), tokens])
  length_N = np.arange(1, longest + 1)
  # A streak that ends at a new token and is not shorter than they are many has
  # the first of them: this leaves few lengths to look at.
  is_short_N = length_N * (times - 1) < num_new
  continues_N = padded[longest + num_old - length_N] == tokens[num_old]
  length_N = length_N[is_short_N | continues_N]
  index_T1 = np.arange(len(tokens))[:, None]
  is_same_TN = padded[longest + index_T1 - length_N] == tokens[:, None]
  other_TN = np.where(is_same_TN, -1, index_T1)
  streak_TN = index_T1 - np.maximum.accumulate(other_TN, axis=0)
  is_end_T = np.any(streak_TN >= length_N * (times - 1), axis=1)
  ends = np.flatnonzero(is_end_T[num_old:]).tolist()
  return ends[0] + 1 if ends else num_new + 1
