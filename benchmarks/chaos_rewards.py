"""A reward that hangs, fails or kills the run, as its environment says.

CHAOS_REWARD is "HOW:PERIOD:OFFSET"; every PERIOD-th prompt from OFFSET on gets
HOW: hang, die, raise, nan or kill. By the environment, for the config of a run
must stay the same over its resumes.
"""

import os
import signal
import threading

VARIABLE = "CHAOS_REWARD"


def judge(prompt, completion: str) -> float:
  """Pays for digits, where nothing is to go wrong."""
  how, period, offset = os.environ.get(VARIABLE, "none:1:0").split(":")
  if prompt.prompt_id % int(period) == int(offset):
    match how:
      case "hang":
        threading.Event().wait()
      case "die":
        os._exit(7)
      case "raise":
        raise ValueError("chaos")
      case "nan":
        return float("nan")
      case "kill":
        os.kill(os.getppid(), signal.SIGKILL)
  digits = sum(character.isdigit() for character in completion)
  return digits / max(len(completion), 1)
