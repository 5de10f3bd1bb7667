"""Progress is one plain line a step, or a live view; text cannot escape."""

import dataclasses
import io

import hypothesis
import hypothesis.strategies as st

from dora_jax.runtime import progress

_STATUS = progress.Status(
  step=1,
  reward=0.25,
  accuracy=None,
  tokens_per_s=1234.5,
  versions_alive=(0, 1),
  lag_mean=0.5,
  waits=(progress.Wait(who="trainer", what="group 3", waited_s=1.5),),
)


class _Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def test_elsewhere_each_step_is_one_line_however_often_it_is_told():
  stream = io.StringIO()
  shown = progress.Progress(2, stream)
  shown.update(dataclasses.replace(_STATUS, step=0))
  for step in (1, 1, 1, 2):
    shown.update(dataclasses.replace(_STATUS, step=step))
  shown.close()
  assert stream.getvalue() == "".join(
    f"step {step}/2 | reward 0.250 | accuracy - | tokens/s 1234 | "
    "versions 0,1 | lag 0.50 | trainer waits 1.5 s for group 3\n"
    for step in (1, 2)
  )


def test_a_terminal_shows_the_view_and_keeps_notes_and_the_last_step():
  stream = _Terminal()
  shown = progress.Progress(2, stream)
  shown.update(_STATUS)
  drawn = stream.getvalue()
  assert "1/2" in drawn and "waits 1.5 s for group 3" in drawn
  shown.note("[red]evaluation\x1b[2J\n")
  shown.update(dataclasses.replace(_STATUS, step=2))
  shown.close()
  assert "[red]evaluation\\x1b[2J\\n" in stream.getvalue()
  assert "step 2/2 | reward 0.250" in stream.getvalue()


def test_a_stream_that_lacks_a_character_still_gets_its_line():
  raw = io.BytesIO()
  shown = progress.Progress(1, io.TextIOWrapper(raw, encoding="ascii"))
  shown.note("2 + 2 = ④")
  assert raw.getvalue() == b"2 + 2 = \\u2463\n"


def test_printable_escapes_what_acts_and_keeps_what_shows():
  text = "a\x1b[31m\r\n\t\x00\u202eé 漢 \\frac"
  shown = "a\\x1b[31m\\r\\n\\t\\x00\\u202eé 漢 \\frac"
  assert progress.printable(text) == shown


@hypothesis.given(st.text())
def test_printable_text_is_printable_and_stays_so(text):
  shown = progress.printable(text)
  assert shown.isprintable()
  assert progress.printable(shown) == shown
