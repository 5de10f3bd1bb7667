"""What befalls a cluster at given times, read from lines of a config."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Kind = Literal["lose", "join", "slow", "outage"]
_NEEDED = {
  "lose": ("GENERATOR",),
  "join": ("NUMBER",),
  "slow": ("GENERATOR", "FACTOR"),
  "outage": ("SECONDS",),
}
_FORMS = " | ".join(
  f"'TIME_S {kind} {' '.join(names)}'" for kind, names in _NEEDED.items()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
  """One thing that happens.

  Attributes:
    time_s: when, on the virtual clock.
    kind: "lose" a generator; "join" so many new ones; "slow": a generator takes
      `factor` times as long from then on (1 heals it); "outage": for `seconds`
      no reward is given, and those asked for meanwhile come at its end.
    generator_id: of "lose" and "slow".
    amount: generators of "join", factor of "slow", seconds of "outage".
  """

  time_s: float
  kind: str
  generator_id: int = -1
  amount: float = 0.0


def parse(lines: Sequence[str]) -> list[Fault]:
  """Reads lines such as "600 lose 3", in order of time.

  Raises:
    ValueError: a line is none of the forms.
  """
  return sorted(map(_parse_line, lines), key=lambda fault: fault.time_s)


def _parse_line(line: str) -> Fault:
  words = line.split()
  try:
    time_s, kind, *rest = words
    if len(rest) != len(_NEEDED[kind]):
      raise ValueError(line)
    generator_id, amount = -1, 0.0
    if kind in ("lose", "slow"):
      generator_id = int(rest[0])
    if kind == "join":
      amount = float(int(rest[0]))
    elif kind != "lose":
      amount = float(rest[-1])
    return Fault(
      time_s=float(time_s), kind=kind, generator_id=generator_id, amount=amount
    )
  except (KeyError, ValueError) as error:
    raise ValueError(
      f"config.faults.events has {line!r} but each must be {_FORMS}."
    ) from error
