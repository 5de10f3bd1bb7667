"""Text to token ids and back: characters, or a Hugging Face tokenizer."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import tokenizers

from dora_jax import interfaces
from dora_jax.tasks import lookup

PAD_ID = 0
STOP_ID = 1
_NUM_SPECIAL = 2
_LARGEST_ID = 2**32 - 1


class CharTokenizer:
  """One token a character: 0 is padding, 1 stops, then the alphabet in order.

  Attributes:
    vocab_size: number of token ids.
    stop_ids: the ids that end a completion.
  """

  def __init__(self, alphabet: str):
    if not alphabet:
      raise ValueError(
        "The alphabet is empty: list every character in"
        " config.tokenizer.alphabet."
      )
    twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if twice:
      raise ValueError(
        f"The alphabet holds {twice} more than once: give each character one"
        " place in config.tokenizer.alphabet."
      )
    self._alphabet = alphabet
    self._id_of = {c: i + _NUM_SPECIAL for i, c in enumerate(alphabet)}
    self.vocab_size = len(alphabet) + _NUM_SPECIAL
    self.stop_ids: tuple[int, ...] = (STOP_ID,)

  def encode(self, text: str) -> list[int]:
    """Token ids of a text, without the stop token."""
    outside = [c for c in text if c not in self._id_of]
    if outside:
      raise ValueError(
        f"Character {outside[0]!r} of {lookup.shorten(text)} is not in the"
        f" alphabet {self._alphabet!r}: add it to config.tokenizer.alphabet."
      )
    return [self._id_of[c] for c in text]

  def decode(self, token_ids: Sequence[int]) -> str:
    """The text of token ids; stop tokens and padding leave no trace."""
    ids = [int(i) for i in token_ids]
    outside = [i for i in ids if not 0 <= i < self.vocab_size]
    if outside:
      raise ValueError(
        f"Token id {outside[0]} is not one of the {self.vocab_size} ids of"
        " config.tokenizer.alphabet."
      )
    return "".join(
      self._alphabet[i - _NUM_SPECIAL] for i in ids if i >= _NUM_SPECIAL
    )


class HfTokenizer:
  """The tokenizer of a Hugging Face folder, through the tokenizers library.

  Attributes:
    vocab_size: the largest token id and one; a model may have more.
    stop_ids: the ids that end a completion; the first ends worked examples.
  """

  def __init__(self, folder: str, *, stop_ids: Sequence[int] = ()):
    """Reads tokenizer.json, and the stop ids where none are given.

    Args:
      folder: holds tokenizer.json and, unless stop ids are given, at least one
        of tokenizer_config.json, generation_config.json and config.json.
      stop_ids: ids that end a completion; empty takes those that the folder's
        files name, the end token of tokenizer_config.json first.
    """
    path = pathlib.Path(folder) / "tokenizer.json"
    if not path.is_file():
      raise FileNotFoundError(
        f"{path} is missing: set config.tokenizer.folder to a folder that"
        " holds tokenizer.json."
      )
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # The library raises nothing more special of a file that it cannot read.
    except Exception as error:
      raise ValueError(
        f"{path} is no tokenizer that can be read ({error}): fetch it again, or"
        " set config.tokenizer.folder to another folder."
      ) from error
    # A file may ask for truncation or padding of its own, which would cut
    # prompts unseen.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    known_ids = set(self._tokenizer.get_vocab(with_added_tokens=True).values())
    self.vocab_size = max(known_ids) + 1
    found = tuple(stop_ids) or self._stop_ids_of(pathlib.Path(folder))
    for stop_id in found:
      if stop_id not in known_ids:
        raise ValueError(
          f"Stop id {stop_id} is not in the vocabulary of {path}, whose ids"
          f" end at {self.vocab_size - 1}: correct config.tokenizer.stop_ids"
          " (or eos_token_id in the folder's files)."
        )
    self.stop_ids: tuple[int, ...] = found

  def encode(self, text: str) -> list[int]:
    """Token ids of a text; special tokens only where the text spells them."""
    try:
      text.encode("utf-8")
    except UnicodeEncodeError as error:
      raise ValueError(
        f"{lookup.shorten(text)} is no Unicode text ({error.reason} at"
        f" character {error.start}): correct the row, config.task.template"
        " or few_shot."
      ) from error
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, token_ids: Sequence[int]) -> str:
    """The text of token ids; stop tokens and padding leave no trace.

    Nor do ids from vocab_size on, for a model may have more than the tokenizer.
    """
    ids = [int(i) for i in token_ids if int(i) not in self.stop_ids]
    if ids and (min(ids) < 0 or max(ids) > _LARGEST_ID):
      raise ValueError(
        f"Token ids reach from {min(ids)} to {max(ids)}, but a tokenizer knows"
        f" 0 to {_LARGEST_ID} at most."
      )
    return self._tokenizer.decode(ids, skip_special_tokens=True)

  def _stop_ids_of(self, folder: pathlib.Path) -> tuple[int, ...]:
    """The end tokens that a folder's files name, each once.

    The tokenizer's own comes first: it ends a turn, where the lists of
    generation_config.json may begin with the one that ends a document.
    """
    path = folder / "tokenizer_config.json"
    token = _read_json(path).get("eos_token")
    if isinstance(token, dict):
      token = token.get("content")
    if not isinstance(token, str | None):
      raise ValueError(
        f"{path} has eos_token {lookup.shorten(token)}, but it must be text:"
        " set config.tokenizer.stop_ids."
      )
    found = [] if token is None else [self._id_of(token, folder)]
    for name in ("generation_config.json", "config.json"):
      found += _token_ids(folder / name)
    if not found:
      raise ValueError(
        f"No file in {folder} names an end token: set"
        " config.tokenizer.stop_ids."
      )
    return tuple(dict.fromkeys(found))

  def _id_of(self, token: str, folder: pathlib.Path) -> int:
    token_id = self._tokenizer.token_to_id(token)
    if token_id is None:
      raise ValueError(
        f"eos_token {token!r} of {folder / 'tokenizer_config.json'} is not in"
        " the vocabulary of tokenizer.json: set config.tokenizer.stop_ids."
      )
    return token_id


def _token_ids(path: pathlib.Path) -> list[int]:
  """The ids of eos_token_id, which is one or a list; none where it is not."""
  ids = _read_json(path).get("eos_token_id")
  found = [] if ids is None else ids if isinstance(ids, list) else [ids]
  for token_id in found:
    if isinstance(token_id, bool) or not isinstance(token_id, int):
      raise ValueError(
        f"{path} has eos_token_id {lookup.shorten(ids)}, but it must be an id"
        " or a list of ids: set config.tokenizer.stop_ids."
      )
  return found


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  """The object that a JSON file holds; nothing where there is no file."""
  if not path.is_file():
    return {}
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f"{path} is not JSON that can be read ({error}): fetch it again, or set"
      " config.tokenizer.folder to another folder."
    ) from error
  if not isinstance(found, dict):
    raise ValueError(
      f"{path} holds {lookup.shorten(found)}, but it must hold a JSON object:"
      " fetch it again."
    )
  return found


def load(
  *, kind: str, alphabet: str, folder: str, stop_ids: Sequence[int]
) -> interfaces.Tokenizer:
  """The tokenizer that config.tokenizer describes.

  Args:
    kind: "char" takes the alphabet, "huggingface" the folder and stop ids.
    alphabet: every character, each once.
    folder: a Hugging Face folder.
    stop_ids: ids that end a completion; empty takes those of the folder.
  """
  lookup.check_name(
    kind,
    ("char", "huggingface"),
    what="tokenizer",
    field="config.tokenizer.kind",
  )
  if kind == "char":
    return CharTokenizer(alphabet)
  return HfTokenizer(folder, stop_ids=stop_ids)
