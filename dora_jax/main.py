"""Trains a policy by reinforcement learning, as a config file describes.

  python -m dora_jax.main --config=configs/NAME.py --workdir=DIR

Any field of the config can be set on the way: --config.trainer.lr=1e-6. With
--replay=OTHER/events.jsonl.gz the run repeats the decisions of another one of
the same config, and on CPU ends with the same params, bit for bit.

The same command in the same workdir goes on with the run that is there, from
its newest complete checkpoint. Ctrl-C and SIGTERM end a run in order: the step
being made is finished, and everything saved.

What an exit status and a message mean is in docs/operations.md.
"""

import os
import pathlib
import re
import shlex
import sys
import time
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from dora_jax import checkpoint, host_memory
from dora_jax import config as config_lib
from dora_jax.coordinator import stepping
from dora_jax.runtime import (
  build,
  cold_start,
  following,
  local,
  part,
  pieces,
  progress,
  resuming,
  watchdog,
)
from dora_jax.runtime import workdir as workdir_lib

EXIT_BROKEN = 1
EXIT_CONFIG = 2
EXIT_NOTHING_LEARNT = 3
EXIT_STALLED = 4
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
_EXIT_SIGNALS = {"sigint": EXIT_INTERRUPTED, "sigterm": EXIT_TERMINATED}
_NOTHING_LEARNT = ("nothing_to_learn", "steps_skipped")


def run(
  config: Any,
  workdir: pathlib.Path,
  *,
  command: str,
  follow: pathlib.Path | None = None,
) -> int:
  """Runs a valid config to the end; returns the exit status.

  Args:
    config: as `config.validate` has checked it.
    workdir: folder for all that is made.
    command: that makes the run, for its summary.
    follow: events.jsonl.gz of another run of this config, to be repeated.

  Raises:
    local.PartFailed: it could not go on; what was good is saved.
    watchdog.GaveUp: nothing has gone on for long; likewise.
  """
  start_s = time.perf_counter()
  found = resuming.find(config, workdir)
  if found and resuming.is_over(config, workdir, found):
    print(
      f"{workdir} holds this run, which has ended after {found.version} steps: "
      "raise config.coordinator.num_steps to go on, or give another --workdir."
    )
    return 0
  with build.build(config, workdir, follow=follow) as made:
    if made.saver.found is not None:
      made.runtime.resume()
    else:
      _begin(config, made)
    ready_s = time.perf_counter()
    made.results.note(f"ready after {ready_s - start_s:.1f} s")
    try:
      reason = made.runtime.run()
    except (local.PartFailed, watchdog.GaveUp):
      if follow is None:
        logging.error("%s", made.runtime.save_last_good())
      made.results.summarise(
        extra={"seconds_before": ready_s - start_s}, command=command
      )
      raise
    # A record that is followed knows nothing of an early end: what was saved on
    # the way is what the run can go on from.
    is_cut = follow is not None and reason in _EXIT_SIGNALS
    failed = "" if is_cut else _save(made)
    broken = made.results.summarise(
      extra={"seconds_before": ready_s - start_s}, command=command
    )
  if failed:
    logging.error("What the run has made last is not saved. %s", failed)
  for sentence in broken:
    logging.error("A promise was broken: %s", sentence)
  if reason in _EXIT_SIGNALS:
    return EXIT_BROKEN if failed else _EXIT_SIGNALS[reason]
  if reason in _NOTHING_LEARNT:
    logging.error("The run has ended: %s", _explain_end(reason, config))
    return EXIT_NOTHING_LEARNT
  if reason == "data_exhausted":
    logging.info("The data ended before config.coordinator.num_steps.")
  return EXIT_BROKEN if broken or failed else 0


def _explain_end(reason: str, config: Any) -> str:
  """Why a run that learnt nothing was ended, and what can be done."""
  if reason == "nothing_to_learn":
    num_groups = (
      config.coordinator.filter_patience * config.coordinator.prompts_per_batch
    )
    return (
      f"{num_groups} groups in a row were solved by all or none of their "
      "members (config.coordinator.filter_groups). Make config.task harder or "
      "easier, or raise config.coordinator.group_size or filter_patience."
    )
  return (
    f"{stepping.MOST_SKIPPED} steps in a row changed nothing, as their "
    "gradient was not finite or no token was left to train on. Lower "
    "config.trainer.lr, or look at config.trainer.mask_truncated."
  )


def _begin(config: Any, made: build.Run) -> None:
  """Makes version 0."""
  if config.cold_start.steps:
    cold_start.cold_start(
      made.trainer,
      made.task.worked_examples(
        prefix=config.cold_start.prefix,
        wrong_share=config.cold_start.wrong_share,
        seed=config.seed,
      ),
      num_steps=config.cold_start.steps,
      batch_size=config.cold_start.batch_size,
      seed=config.seed,
      note=made.results.note,
    )
  made.trainer_part.publish()
  if config.checkpoint.every_steps:
    made.runtime.save()


def _save(made: build.Run) -> str:
  """Saves what a run has ended with; says what went wrong, if anything."""
  try:
    made.runtime.save()
    made.saver.checkpoints.wait()
  except checkpoint.SaveFailed as error:
    return str(error)
  return ""


def prepare_devices(config: Any) -> None:
  """Memory, and the CPU devices that the config asks for; before JAX starts."""
  host_memory.share_arena()
  if config.mesh.host_devices:
    jax.config.update("jax_num_cpu_devices", config.mesh.host_devices)


def main(argv: list[str]) -> int:
  """Checks the config, then runs it."""
  if not flags.FLAGS["verbosity"].present:
    # Orbax tells of every file that it writes.
    logging.set_verbosity(logging.WARNING)
  config = flags.FLAGS.config
  workdir = pathlib.Path(flags.FLAGS.workdir)
  follow = flags.FLAGS.replay and pathlib.Path(flags.FLAGS.replay)
  try:
    if len(argv) > 1:
      raise ValueError(
        f"Arguments {argv[1:]} mean nothing: use --config.FIELD."
      )
    # Else all would be written where the command happens to be started.
    if not flags.FLAGS.workdir:
      raise ValueError(
        "--workdir is empty: give a folder for all that is made."
      )
    prepare_devices(config)
    config_lib.validate(config, num_devices=len(jax.devices()))
    pieces.make_objective(config)
    pieces.make_advantage(config)
    pieces.make_adapters(config)
    pieces.make_reuse(config)
    found = resuming.find(config, workdir)
    if follow:
      following.open_record(
        config,
        workdir,
        follow,
        num_past=found.extras["num_events"] if found else 0,
      )
    workdir_lib.prepare(workdir)
  except (ValueError, FileNotFoundError) as error:
    print(f"error: {progress.printable(str(error))}", file=sys.stderr)
    return EXIT_CONFIG
  command = shlex.join(["python", "-m", "dora_jax.main", *sys.argv[1:]])
  try:
    status = run(config, workdir, command=command, follow=follow)
  except build.CannotBuild as error:
    logging.debug("Where it was found:", exc_info=True)
    print(f"error: {progress.printable(str(error))}", file=sys.stderr)
    status = EXIT_CONFIG
  except local.PartFailed as error:
    logging.exception("The run has ended: %s", error)
    status = EXIT_BROKEN
  except watchdog.GaveUp as error:
    logging.error("The run has ended: %s", error)
    status = EXIT_STALLED
  _leave_if_stuck(status)
  return status


def _leave_if_stuck(status: int) -> None:
  """Ends the process at once where a part of the run has not ended.

  Python and JAX would wait at exit for what it is stuck in.
  """
  stuck = part.alive()
  if stuck:
    logging.error("The process ends although %s has not.", ", ".join(stuck))
    logging.flush()
    sys.stdout.flush()
    os._exit(status)


def unknown_field(argv: list[str]) -> str | None:
  """What is wrong with a --config.FIELD that does not exist, if one is.

  Asked before the flags are parsed, which would end in a traceback.
  """
  paths = [a.partition("=")[2] for a in argv if re.match("--?config=", a)]
  if not paths:
    return None
  config = config_lib.load(paths[-1].partition(":")[0])
  return config_lib.explain_unknown(argv, config)


def define_flags() -> None:
  """Defines the flags; only where this is the program that runs."""
  config_flags.DEFINE_config_file(
    "config", None, "Python file with get_config().", lock_config=True
  )
  flags.DEFINE_string("workdir", None, "Folder for all that is made.")
  flags.DEFINE_string(
    "replay", None, "events.jsonl.gz of a run of this config, to repeat it."
  )
  flags.mark_flags_as_required(["config", "workdir"])


def parse_flags(argv: list[str]) -> list[str]:
  """Parses the flags; what cannot be parsed ends the program in one line."""
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
  try:
    wrong = unknown_field(sys.argv[1:])
  except (ValueError, FileNotFoundError) as error:
    wrong = str(error)
  if wrong is not None:
    print(f"error: {wrong}", file=sys.stderr)
    sys.exit(EXIT_CONFIG)
  define_flags()
  app.run(main, flags_parser=parse_flags)
