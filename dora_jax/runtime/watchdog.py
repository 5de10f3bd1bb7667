"""Notices where nothing goes on, and says who waits for what since when.

Two things count as a stall: that no part has reported anything, and that one
part is at one thing, for longer than config.runtime.stall_s.
"""

import faulthandler
import json
import pathlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from absl import logging

from dora_jax.coordinator import coordinator as coordinator_lib
from dora_jax.runtime import orders, part

STATE_NAME = "stall.json"
STACKS_NAME = "stall_threads.txt"
# How often it looks, at the least.
_LOOK_S = 1.0
# Groups that a message names; the file has all.
_NUM_NAMED = 5

# (source, target) -> the requests that are on their way.
Moves = Mapping[tuple[int, int], Collection[orders.Name]]


class GaveUp(RuntimeError):
  """A stall has lasted for config.runtime.give_up_s."""


class Watchdog:
  """Watches the parts; used by the runtime's thread."""

  def __init__(
    self,
    *,
    coordinator: coordinator_lib.Coordinator,
    parts: Sequence[part.Part],
    moves: Callable[[], Moves],
    workdir: pathlib.Path,
    stall_s: float,
    give_up_s: float,
  ):
    """Begins to watch.

    Args:
      coordinator: whose groups and waits are reported.
      parts: each once.
      moves: those under way.
      workdir: gets the state of a stalled run.
      stall_s: a stall beyond it is reported, and again after twice as long.
      give_up_s: a stall that lasts so long raises; 0 never does.
    """
    self._coordinator = coordinator
    self._parts = parts
    self._moves = moves
    self._workdir = workdir
    self._stall_s = stall_s
    self._give_up_s = give_up_s
    self._heard_s = self._looked_s = time.monotonic()
    self._next_report_s = stall_s
    # What was reported of each part: since when it is at one thing.
    self._reported: dict[str, float] = {}
    # Since when each wait is seen, and each open group.
    self._waits_since_s: dict[tuple[str, str], float] = {}
    self._open_since_s: dict[int, float] = {}

  def hear(self) -> None:
    """A part has reported something."""
    self._heard_s = time.monotonic()
    self._next_report_s = self._stall_s

  def look(self, further: Sequence[str] = ()) -> bool:
    """Looks for a stall, unless it has just done so.

    Args:
      further: sentences for the report.

    Returns:
      Whether there was one to report.

    Raises:
      GaveUp: it lasts for give_up_s.
    """
    now_s = time.monotonic()
    if now_s - self._looked_s < min(_LOOK_S, self._stall_s / 4):
      return False
    self._looked_s = now_s
    self._note_waits(now_s)
    silent_s = now_s - self._heard_s
    found = self._stuck_parts(now_s)
    if silent_s > self._next_report_s:
      self._next_report_s *= 2
      found.append(f"Nothing has happened for {silent_s:.0f} s")
    longest_s = max([silent_s, *self._busy_s(now_s).values()])
    gives_up = 0 < self._give_up_s <= longest_s
    if gives_up and not found:
      found.append(f"Still at a stand after {longest_s:.0f} s")
    if found:
      self._report(found, further, now_s)
    if gives_up:
      raise GaveUp(
        f"The run was at a stand for {longest_s:.0f} s "
        f"(config.runtime.give_up_s = {self._give_up_s:g}): see {STATE_NAME} "
        f"and {STACKS_NAME} of the workdir."
      )
    return bool(found)

  def _note_waits(self, now_s: float) -> None:
    self._waits_since_s = {
      pair: self._waits_since_s.get(pair, now_s)
      for pair in self._coordinator.waits()
    }
    self._open_since_s = {
      group_id: self._open_since_s.get(group_id, now_s)
      for group_id in self._coordinator.ledger.open
    }

  def _busy_s(self, now_s: float) -> dict[str, float]:
    """Part -> how long it is at one thing; without those that wait."""
    return {
      each.part: now_s - each.since_s
      for each in self._parts
      if each.is_alive() and not each.doing.startswith("waiting")
    }

  def _stuck_parts(self, now_s: float) -> list[str]:
    """Those that are at one thing for too long, each said once."""
    found = []
    busy_s = self._busy_s(now_s)
    for each in self._parts:
      since_s = each.since_s
      if (
        busy_s.get(each.part, 0.0) > self._stall_s
        and self._reported.get(each.part) != since_s
      ):
        self._reported[each.part] = since_s
        found.append(
          f"{each.part} is at one thing, {each.doing}, for "
          f"{now_s - since_s:.0f} s"
        )
    return found

  def _report(
    self, found: Sequence[str], further: Sequence[str], now_s: float
  ) -> None:
    state = self._state(now_s)
    (self._workdir / STATE_NAME).write_text(json.dumps(state, indent=2))
    with (self._workdir / STACKS_NAME).open("w") as file:
      faulthandler.dump_traceback(file, all_threads=True)
    lines = [
      *(
        f"{w['who']} waits for {w['what']}, {w['s']} s" for w in state["waits"]
      ),
      *(f"{p['part']}: {p['doing']}, {p['s']} s" for p in state["parts"]),
      *map(_describe_group, state["groups"][:_NUM_NAMED]),
      *(
        f"{len(move['requests'])} requests move from generator "
        f"{move['source_id']} to {move['target_id']}"
        for move in state["moves"]
      ),
      *further,
    ]
    if len(state["groups"]) > _NUM_NAMED:
      lines.append(f"{len(state['groups']) - _NUM_NAMED} more groups are open")
    logging.error(
      "%s (config.runtime.stall_s = %g). %s. The coordinator's state is in %s "
      "of the workdir, what each thread does in %s.",
      "; ".join(found),
      self._stall_s,
      "; ".join(lines),
      STATE_NAME,
      STACKS_NAME,
    )

  def _state(self, now_s: float) -> dict[str, Any]:
    """All there is to say, JSON-able; times in seconds, the longest first."""
    groups = [
      {
        "group_id": group.group_id,
        "version": group.version,
        "s": round(now_s - self._open_since_s[group.group_id], 1),
        "running": {str(m): g for m, g in group.running.items()},
        "unscored": sorted(group.unscored),
        "waiting": group.waiting,
      }
      for group in self._coordinator.ledger.open.values()
    ]
    return {
      "silent_s": round(now_s - self._heard_s, 1),
      "parts": [
        {
          "part": each.part,
          "doing": each.doing if each.is_alive() else "ended",
          "s": round(now_s - each.since_s, 1),
        }
        for each in self._parts
      ],
      "waits": [
        {"who": who, "what": what, "s": round(now_s - since_s, 1)}
        for (who, what), since_s in self._waits_since_s.items()
      ],
      "groups": sorted(groups, key=lambda g: -g["s"]),
      "moves": [
        {
          "source_id": source_id,
          "target_id": target_id,
          "requests": [list(name) for name in names],
        }
        for (source_id, target_id), names in self._moves().items()
      ],
      "coordinator": self._coordinator.snapshot(),
    }


def _describe_group(group: Mapping[str, Any]) -> str:
  """Says where each member of an open group is."""
  by_generator: dict[int, list[str]] = {}
  for member, generator_id in group["running"].items():
    by_generator.setdefault(generator_id, []).append(member)
  places = [
    f"{', '.join(members)} on generator {generator_id}"
    for generator_id, members in sorted(by_generator.items())
  ]
  for name, words in (
    ("unscored", "without reward"),
    ("waiting", "without generator"),
  ):
    if group[name]:
      places.append(f"{', '.join(map(str, group[name]))} {words}")
  return (
    f"group {group['group_id']} of version {group['version']} is open for "
    f"{group['s']} s (members {'; '.join(places)})"
  )
