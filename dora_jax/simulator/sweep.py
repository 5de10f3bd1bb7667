"""Many settings of one config: read, run beside each other, compared."""

import concurrent.futures
import copy
import dataclasses
import itertools
import multiprocessing
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dora_jax.simulator import pieces

Config = Any
_COMPARE = {"<=": operator.le, ">=": operator.ge}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """One way to run a config.

  Attributes:
    name: of it.
    overrides: "section.field" -> value.
  """

  name: str
  overrides: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
  """What the best setting has to keep, such as lag_mean <= 1."""

  measure: str
  sign: str
  value: float

  def holds(self, values: Mapping[str, float]) -> bool:
    """Whether these values keep it.

    Raises:
      ValueError: there is no such measure.
    """
    if self.measure not in values:
      raise ValueError(
        f"--best speaks of {self.measure!r}, but what is measured is "
        f"{', '.join(sorted(values))}."
      )
    return _COMPARE[self.sign](values[self.measure], self.value)


def parse_bound(text: str) -> Bound:
  """Reads a bound such as "lag_mean<=1"."""
  match = re.fullmatch(r"\s*([a-z_/]+)\s*(<=|>=)\s*([0-9.eE+-]+)\s*", text)
  if match is None:
    raise ValueError(
      f"--best is {text!r} but must read MEASURE<=NUMBER or MEASURE>=NUMBER."
    )
  return Bound(measure=match[1], sign=match[2], value=float(match[3]))


def cases(config: Config) -> list[Setting]:
  """The config's own cases; the config itself where it names none."""
  named = config.cases.to_dict()
  if not named:
    return [Setting(name=config.coordinator.schedule, overrides={})]
  return [
    Setting(
      name=name,
      overrides={
        f"{section}.{field}": value
        for section, fields in sections.items()
        for field, value in fields.items()
      },
    )
    for name, sections in named.items()
  ]


def product(config: Config, text: str) -> list[Setting]:
  """All combinations of values, as "section.field=1,2;other.field=3,4".

  Raises:
    ValueError: a field does not exist, or a value is of another type.
  """
  axes = []
  for part in filter(None, text.split(";")):
    field, _, values = part.partition("=")
    field = field.strip()
    axes.append([(field, _value(config, field, v)) for v in values.split(",")])
  if not axes:
    raise ValueError("--sweep names no field: write section.field=1,2;…")
  return [
    Setting(
      name=" ".join(f"{f.rpartition('.')[2]}={v}" for f, v in choice),
      overrides=dict(choice),
    )
    for choice in itertools.product(*axes)
  ]


def changed(config: Config, overrides: Mapping[str, Any]) -> Config:
  """A copy of the config with these fields changed."""
  config = copy.deepcopy(config)
  for field, value in overrides.items():
    _check_field(config, field)
    section, name = field.split(".")
    config[section][name] = value
  return config


def run(
  config: Config, settings: Sequence[Setting], *, num_processes: int
) -> Iterator[tuple[int, dict[str, float]]]:
  """Runs all settings; (index, measured values) as each ends."""
  configs = [changed(config, setting.overrides) for setting in settings]
  if num_processes == 1 or len(configs) == 1:
    for index, each in enumerate(configs):
      yield index, pieces.simulate(each)
    return
  with concurrent.futures.ProcessPoolExecutor(
    min(num_processes, len(configs)),
    # A process that is forked would share locks with threads of this one.
    mp_context=multiprocessing.get_context("spawn"),
  ) as pool:
    futures = {
      pool.submit(pieces.simulate, each): index
      for index, each in enumerate(configs)
    }
    for future in concurrent.futures.as_completed(futures):
      yield futures[future], future.result()


def best(
  results: Sequence[Mapping[str, float]], bound: Bound | None
) -> int | None:
  """Index of the most tokens/s under the bound; None where none keeps it."""
  allowed = [
    index
    for index, values in enumerate(results)
    if bound is None or bound.holds(values)
  ]
  if not allowed:
    return None
  return max(allowed, key=lambda index: results[index]["tokens_per_s"])


def _check_field(config: Config, field: str) -> None:
  section, _, name = field.partition(".")
  if section not in config or name not in config[section]:
    raise ValueError(
      f"config.{field} does not exist. All fields are in configs/sim/common.py."
    )


def _value(config: Config, field: str, text: str) -> Any:
  """The text as the type that the field has."""
  _check_field(config, field)
  section, name = field.split(".")
  kind = type(config[section][name])
  if kind is bool and text in ("True", "False"):
    return text == "True"
  if kind in (int, float, str):
    try:
      return kind(text)
    except ValueError:
      pass
  raise ValueError(
    f"--sweep gives config.{field} the value {text!r}, which is no "
    f"{kind.__name__}."
  )
