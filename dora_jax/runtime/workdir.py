"""The folder of a run: made, proved to be writable, links out of it told."""

import pathlib
import tempfile

from absl import logging


def prepare(workdir: pathlib.Path) -> None:
  """Makes a workdir where it is missing; says where it leads elsewhere.

  A run removes and replaces files of its workdir. So what lies in another place
  by a link is told, and what is not a folder to write in is refused.

  Raises:
    ValueError: the workdir is no folder, or nothing can be written in it.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=workdir) as file:
      file.write(b"x")
  except OSError as error:
    raise ValueError(
      f"--workdir={workdir} cannot be written in ({error.strerror}): it must "
      "be a folder, or a name that nothing has yet; give another --workdir."
    ) from error
  real = workdir.resolve()
  if workdir.is_symlink():
    logging.warning("--workdir=%s is a link to %s.", workdir, real)
  for path in sorted(real.iterdir()):
    if path.is_symlink() and not path.resolve().is_relative_to(real):
      logging.warning(
        "%s of the workdir is a link out of it: what belongs there is written "
        "to %s.",
        path.name,
        path.resolve(),
      )
