"""What a run shows while it runs: a live view on a terminal, lines elsewhere.

On a terminal the view is redrawn by `update` itself, so that no thread is
needed; elsewhere each finished step is one plain line.
"""

import dataclasses
import io
import time
import typing
from typing import TextIO

import rich.console
import rich.live
import rich.table
import rich.text

# Redrawing more often than the eye follows would only cost the run.
_REDRAW_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
  """A part of the run that cannot go on.

  Attributes:
    who: the part, such as "trainer" or "generator 2".
    what: what it waits for, such as "group 17 (3 of 8 scored)".
    waited_s: for how long already.
  """

  who: str
  what: str
  waited_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
  """Where a run stands.

  Attributes:
    step: finished training steps.
    reward: mean over the last batch; None before the first.
    accuracy: on held-out prompts when last evaluated; None before that.
    tokens_per_s: trained prompt and completion tokens a second.
    versions_alive: those that a generator or an unfinished trajectory needs.
    lag_mean: of the last batch, in versions; None before the first.
    waits: who waits for whom, the longest first.
  """

  step: int
  reward: float | None
  accuracy: float | None
  tokens_per_s: float
  versions_alive: tuple[int, ...]
  lag_mean: float | None
  waits: tuple[Wait, ...] = ()


class Progress:
  """Shows a run on a stream; used by one thread.

  Args:
    total_steps: training steps that the run will make.
    stream: a terminal, or anything that takes text.
  """

  def __init__(self, total_steps: int, stream: TextIO | io.TextIOBase):
    self._total_steps = total_steps
    self._stream = stream
    self._last_step = 0
    self._drawn_s = -_REDRAW_S
    self._status: Status | None = None
    self._live: rich.live.Live | None = None
    if stream.isatty():
      file = typing.cast(TextIO, stream)
      console = rich.console.Console(file=file, highlight=False)
      self._live = rich.live.Live(
        console=console, auto_refresh=False, transient=True
      )
      self._live.start()

  def update(self, status: Status) -> None:
    """Shows where the run stands; may be called as often as one likes."""
    self._status = status
    is_due = time.monotonic() - self._drawn_s >= _REDRAW_S
    if self._live is not None and is_due:
      self._live.update(_view(status, self._total_steps), refresh=True)
      self._drawn_s = time.monotonic()
    if status.step > self._last_step:
      self._last_step = status.step
      if self._live is None:
        self.note(_line(status, self._total_steps))

  def note(self, text: str) -> None:
    """Prints a line that stays; the view goes on below it."""
    encoding = self._stream.encoding or "utf-8"
    # A stream that cannot show a character must not stop the run.
    text = printable(text).encode(encoding, "backslashreplace").decode(encoding)
    if self._live is not None:
      self._live.console.print(rich.text.Text(text))
    else:
      self._stream.write(text + "\n")
      self._stream.flush()

  def close(self) -> None:
    """Takes the live view away; the last step stays as a line."""
    if self._live is None:
      return
    live, self._live = self._live, None
    live.stop()
    if self._status is not None:
      self.note(_line(self._status, self._total_steps))


def printable(text: str) -> str:
  r"""Escapes what could move a cursor, colour a terminal or hide text.

  A policy may sample any character: escape codes, line ends, and marks that
  turn the direction of writing come out as \x1b, \n, \u202e.
  """
  return "".join(
    c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
    for c in text
  )


def _line(status: Status, total_steps: int) -> str:
  parts = [f"{name} {value}" for name, value in _fields(status, total_steps)]
  parts += [
    f"{w.who} waits {w.waited_s:.1f} s for {w.what}" for w in status.waits
  ]
  return " | ".join(parts)


def _view(status: Status, total_steps: int) -> rich.table.Table:
  table = rich.table.Table.grid(padding=(0, 2))
  for name, value in _fields(status, total_steps):
    table.add_row(name, rich.text.Text(value))
  for wait in status.waits:
    who = rich.text.Text(printable(wait.who))
    what = f"waits {wait.waited_s:.1f} s for {wait.what}"
    table.add_row(who, rich.text.Text(printable(what)))
  return table


def _fields(status: Status, total_steps: int) -> list[tuple[str, str]]:
  def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

  versions = ",".join(map(str, status.versions_alive)) or "-"
  return [
    ("step", f"{status.step}/{total_steps}"),
    ("reward", number(status.reward, 3)),
    ("accuracy", number(status.accuracy, 3)),
    ("tokens/s", number(status.tokens_per_s, 0)),
    ("versions", versions),
    ("lag", number(status.lag_mean, 2)),
  ]
