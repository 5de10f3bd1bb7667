import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dora_jax import types
from dora_jax.generator import stopping

# The bytes that each token stands for, as in a byte-level vocabulary.
_PIECES = [b"a", b"b", b"ab", b"a\n", b"\n", b"\xc3", b"\xa9", b"\xc3\xa9"]


def _decode(token_ids):
  return b"".join(_PIECES[i] for i in token_ids).decode(errors="replace")


def _decode_runs(token_ids):
  """As where one byte that fits nowhere spoils all non-ASCII around it."""
  text = ""
  joined = b"".join(_PIECES[i] for i in token_ids)
  for part in np.split(
    np.frombuffer(joined, np.uint8),
    np.flatnonzero(np.diff(np.frombuffer(joined, np.uint8) > 127)) + 1,
  ):
    try:
      text += part.tobytes().decode()
    except UnicodeDecodeError:
      text += stopping.REPLACEMENT * len(part)
  return text


def _find(tokens, rules, *, starts=(0,), decode=_decode):
  """Looks through chunks that begin at `starts`: (tokens kept, reason)."""
  tokens = np.array(tokens, np.int32)
  for start, end in zip(starts, (*starts[1:], len(tokens)), strict=True):
    first = max(0, start + 1 - stopping.num_looked_at(rules))
    found = stopping.find_end(
      tokens[first:end], num_new=end - start, stopping=rules, decode=decode
    )
    if found is not None:
      return start + found[0], found[1]
  return None


@pytest.mark.parametrize(
  ("tokens", "strings", "num_kept"),
  [
    # One token, the end of a token, the middle of one, over two, over three.
    ([1, 0, 1, 0], ("a",), 2),
    ([1, 2, 1], ("b",), 1),
    ([1, 2, 1], ("a",), 2),
    ([0, 1, 1, 1], ("bb",), 3),
    ([0, 0, 1, 1, 0], ("abb",), 4),
    ([0, 4, 1, 3], ("x", "a\n"), 2),
    # A character of two tokens is there with its second.
    ([5, 0, 5, 6, 0], ("é",), 4),
    ([0, 7, 0], ("aé",), 2),
    ([1, 1, 1], ("a",), None),
  ],
)
def test_stop_strings_by_hand(tokens, strings, num_kept):
  rules = types.Stopping(stop_strings=strings)
  expected = None if num_kept is None else (num_kept, "stop")
  for chunk in (1, 2, len(tokens)):
    starts = range(0, len(tokens), chunk)
    assert _find(tokens, rules, starts=starts) == expected


def test_a_string_is_found_before_a_later_byte_spoils_it():
  rules = types.Stopping(stop_strings=("é",))
  assert _decode_runs([0, 7, 5]) == "a" + 3 * stopping.REPLACEMENT
  assert _find([0, 7, 5], rules, decode=_decode_runs) == (2, "stop")


@pytest.mark.parametrize(
  ("tokens", "longest", "times", "num_kept"),
  [
    ([5, 5, 5, 5], 1, 3, 3),
    ([5, 5, 6, 5, 5, 5], 1, 3, 6),
    ([1, 2, 1, 2, 1, 2], 2, 3, 6),
    ([1, 2, 1, 2, 1, 2], 1, 3, None),
    ([9, 1, 2, 3, 1, 2, 3, 1], 3, 2, 7),
    ([1, 2, 3, 1, 2], 3, 2, None),
    ([2, 2, 2, 2], 4, 2, 2),
  ],
)
def test_repetition_by_hand(tokens, longest, times, num_kept):
  rules = types.Stopping(repeated_tokens=longest, repetitions=times)
  expected = None if num_kept is None else (num_kept, "repetition")
  for chunk in (1, 2, len(tokens)):
    starts = range(0, len(tokens), chunk)
    assert _find(tokens, rules, starts=starts) == expected


def test_the_first_end_counts_and_a_string_goes_before_a_repetition():
  both = types.Stopping(stop_strings=("bb",), repeated_tokens=2, repetitions=2)
  assert _find([0, 1, 1, 0], both) == (3, "stop")
  assert _find([0, 0, 1, 1], both) == (2, "repetition")


def _find_slowly(tokens, rules):
  """Looks at all tokens after each one."""
  for end in range(1, len(tokens) + 1):
    begun = tokens[:end]
    if any(string in _decode(begun) for string in rules.stop_strings):
      return end, "stop"
    for length in range(1, rules.repeated_tokens + 1):
      run = begun[-length:] * rules.repetitions
      if begun[-len(run) :] == run:
        return end, "repetition"
  return None


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(
  tokens=st.lists(st.integers(0, len(_PIECES) - 1), min_size=1, max_size=30),
  cuts=st.sets(st.integers(1, 29)),
  strings=st.lists(st.text("ab\né", min_size=1, max_size=4), max_size=2),
  longest=st.integers(0, 4),
  times=st.integers(2, 4),
  decode=st.sampled_from([_decode, _decode_runs]),
)
def test_chunks_are_looked_through_as_if_token_by_token(
  tokens, cuts, strings, longest, times, decode
):
  rules = types.Stopping(
    stop_strings=tuple(strings), repeated_tokens=longest, repetitions=times
  )
  starts = (0, *sorted(cut for cut in cuts if cut < len(tokens)))
  found = _find(tokens, rules, starts=starts, decode=decode)
  each = range(len(tokens))
  assert found == _find(tokens, rules, starts=each, decode=decode)
  if decode is _decode:
    assert found == _find_slowly(tokens, rules)
