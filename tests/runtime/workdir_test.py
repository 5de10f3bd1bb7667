"""A workdir of no use is refused; one that leads elsewhere is told."""

import pytest
from absl import logging

from dora_jax.runtime import workdir


def test_a_workdir_is_made_or_refused_by_name(tmp_path):
  workdir.prepare(tmp_path / "a" / "b")
  workdir.prepare(tmp_path / "a" / "b")
  assert list((tmp_path / "a" / "b").iterdir()) == []
  (tmp_path / "file").write_text("x")
  for path in (tmp_path / "file", tmp_path / "file" / "b"):
    with pytest.raises(ValueError, match=r"--workdir=.*cannot be written in"):
      workdir.prepare(path)


def test_links_out_of_a_workdir_are_told(tmp_path, caplog):
  (tmp_path / "real").mkdir()
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "link").symlink_to(tmp_path / "real")
  (tmp_path / "real" / "inside").symlink_to(tmp_path / "real" / "trace.json")
  (tmp_path / "real" / "checkpoints").symlink_to(tmp_path / "elsewhere")
  logging.set_verbosity(logging.WARNING)
  workdir.prepare(tmp_path / "link")
  said = [entry.getMessage() for entry in caplog.records]
  assert len(said) == 2
  assert said[0].endswith(f"is a link to {tmp_path / 'real'}.")
  assert said[1].startswith("checkpoints of the workdir is a link out of it")
