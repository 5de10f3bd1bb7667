"""Any text for any field: a config that says so, or an error that says why."""

import contextlib
import math
import pathlib
import string
import sys
import warnings
from typing import Any

from absl import flags
from hypothesis import strategies as st
from ml_collections import config_dict, config_flags

from dora_jax import config as config_lib
from dora_jax.runtime import pieces
from tests.fuzz import trying

_ROOT = pathlib.Path(__file__).parents[2]
_FILE = _ROOT / "configs" / "quickstart.py"
_BASE: Any = config_lib.load(_FILE)


def _leaves(config: Any, prefix: str = "") -> dict[str, Any]:
  found = {}
  for name, value in config.items():
    if isinstance(value, config_dict.ConfigDict):
      found |= _leaves(value, f"{prefix}{name}.")
    else:
      found[prefix + name] = value
  return found


_FIELDS = sorted(_leaves(_BASE))
_ODD = [
  "", " ", "0", "-1", "1", "2", "3.5", "1e400", "-inf", "inf", "nan", "None",
  "True", "no", "auto", "0x10", "1_000", "٣", "9" * 30, "9" * 5000, "1e-320",
  "[]", "()", "(1,)", "[1", "1,2", "('',)", "{}", "\x00", "\x1b[2J", "\ud800",
  "../..", "/dev/null", "dora", "xla", "jsonl", "huggingface", "int8", "k3",
  "__import__('os').abort()", "lambda: 0", "$HOME", "%s", "{question}",
]  # fmt: skip
_TEXTS = st.one_of(
  st.sampled_from(_ODD),
  st.text(max_size=8),
  st.text(alphabet=string.printable, max_size=12),
  st.integers(-5, 70).map(str),
  st.integers().map(str),
  st.floats().map(str),
)
_OVERRIDES = st.lists(
  st.tuples(st.sampled_from(_FIELDS), _TEXTS), min_size=1, max_size=3
)
_MISSPELT = st.tuples(
  st.sampled_from(_FIELDS), st.integers(0, 40), st.text(max_size=3)
)


@contextlib.contextmanager
def _as_command_line(argv: list[str]):
  before, sys.argv = sys.argv, argv
  try:
    yield
  finally:
    sys.argv = before


def _parse(arguments: list[str]) -> Any:
  values = flags.FlagValues()
  config_flags.DEFINE_config_file(
    "config", None, "", lock_config=True, flag_values=values
  )
  argv = ["main", f"--config={_FILE}", *arguments]
  # The library looks there for what is overridden.
  with _as_command_line(argv), warnings.catch_warnings():
    # Of how it imports a file.
    warnings.simplefilter("ignore", DeprecationWarning)
    values(argv)
  return values.config


def _means(value: Any, text: str, before: Any) -> bool:
  """Whether a field's value is what its text says, by the field's type."""
  if isinstance(before, bool):
    return value == (text.lower() in ("true", "t", "1", "yes", "y", "on"))
  if isinstance(before, int):
    return value == int(text, 0) if "x" in text else value == int(text)
  if isinstance(before, float):
    return value == float(text) or math.isnan(value)
  if isinstance(before, str):
    return value == text
  return isinstance(value, tuple)


def _override(pairs: list[tuple[str, str]]) -> str:
  arguments = [f"--config.{field}={text}" for field, text in pairs]
  assert config_lib.explain_unknown(arguments, _BASE) is None
  try:
    config = _parse(arguments)
  except flags.Error as error:
    assert any(f"config.{field}" in str(error) for field, _ in pairs), error
    return "refused by the parser"
  last = dict(pairs)
  for field, value in _leaves(config).items():
    before = _leaves(_BASE)[field]
    if field in last:
      assert _means(value, last[field], before), (field, value, last[field])
    else:
      assert value == before, field
  try:
    config_lib.validate(config, num_devices=8)
    pieces.make_objective(config)
    pieces.make_advantage(config)
    pieces.make_schedule(config)
    pieces.make_sampling(config)
    pieces.make_stopping(config)
  except ValueError as error:
    message = str(error)
    assert "config." in message or any(
      field.rpartition(".")[2] in message for field in last
    ), message
    assert len(message) < 2000
    return "refused by its check"
  return "taken"


@trying.amounts(few=40, many=8_000)
def test_an_override_is_what_it_says_or_refused(amount):
  ended = trying.run("config overrides", _OVERRIDES, _override, amount)
  assert len(ended) == 3


def _misspell(drawn: tuple[str, int, str]) -> str:
  field, place, inserted = drawn
  wrong = field[:place] + inserted + field[place:]
  said = config_lib.explain_unknown([f"--config.{wrong}=1"], _BASE)
  if said is not None:
    assert "does not exist" in said and len(said) < 500
    return "explained"
  try:
    _parse([f"--config.{wrong}=1"])
  except (flags.Error, AttributeError, KeyError, ValueError) as error:
    return f"refused by the parser ({type(error).__name__})"
  return "a field"


@trying.amounts(few=50, many=5_000)
def test_a_misspelt_field_is_explained(amount):
  ended = trying.run("misspelt fields", _MISSPELT, _misspell, amount)
  assert ended["explained"] > 0.5 * ended.total()
