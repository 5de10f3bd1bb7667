"""Finds things by the names that a config gives them."""

import difflib
import importlib
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_SHORTENER = reprlib.Repr()
_SHORTENER.maxstring = _SHORTENER.maxother = _SHORTENER.maxlong = 100


def shorten(value: Any) -> str:
  """A value's repr, cut to what a message can hold; escapes what is unseen."""
  return _SHORTENER.repr(value)


def check_name(
  name: str, known: Iterable[str], *, what: str, field: str
) -> None:
  """Refuses a name that is not known; says the nearest one that is.

  Args:
    name: the name found.
    known: the names that would do.
    what: what is named, for the message.
    field: the config field that holds the name.

  Raises:
    ValueError: the name is none of them.
  """
  names = sorted(known)
  if name in names:
    return
  near = difflib.get_close_matches(name, names, n=1)
  hint = f" Did you mean {near[0]!r}?" if near else ""
  raise ValueError(
    f"Unknown {what} {name!r}.{hint} Set {field} to one of: {', '.join(names)}."
  )


def find_function(
  name: str,
  known: Mapping[str, Callable[..., Any]],
  *,
  what: str,
  field: str,
) -> Callable[..., Any]:
  """The function of a registered name, or of a path "package.module:function".

  Raises:
    ValueError: the name is not registered, or the module has no such function.
  """
  if ":" not in name:
    check_name(name, known, what=what, field=field)
    return known[name]
  module_name, _, attribute = name.partition(":")
  function = getattr(importlib.import_module(module_name), attribute, None)
  if not callable(function):
    raise ValueError(
      f"Module {module_name!r} has no function {attribute!r}: set {field} to"
      f" 'package.module:function' or to one of: {', '.join(sorted(known))}."
    )
  return function


def check_keywords(
  function: Callable[..., Any],
  keywords: Iterable[str],
  *,
  num_positional: int,
  field: str,
) -> None:
  """Refuses keyword arguments that a function does not take.

  Args:
    function: what will be called.
    keywords: the names of the arguments given.
    num_positional: how many leading parameters are given by position.
    field: the config field that holds the arguments.

  Raises:
    ValueError: a name is not among the function's parameters.
  """
  parameters = list(inspect.signature(function).parameters.values())
  if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
    return
  known = [p.name for p in parameters[num_positional:]]
  for keyword in keywords:
    if not known:
      raise ValueError(
        f"{keyword!r} is given, but no parameter is taken: empty {field}."
      )
    check_name(keyword, known, what="parameter", field=field)
