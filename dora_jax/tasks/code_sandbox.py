"""A process that runs one program which a policy has written, and ends.

Started by code_reward.py, with a JSON object on its standard input. In order:
it leaves the network and all other processes behind where the kernel permits
it, lowers its limits, gives up its rights and its files, tells by a pipe that
it has, and only then reads the program as Python.
"""

import json
import os
import sys

from dora_jax.tasks import confine

# Where shared libraries, time zones and random bytes are.
_SYSTEM = ("/dev/null", "/dev/urandom", "/lib", "/lib64", "/usr/lib")


def main() -> None:
  """Reads the order and carries it out; does not return."""
  confine.end_with_parent()
  order = json.load(sys.stdin)
  if order["use_namespaces"] and confine.leave_processes():
    # The first process of the new world is ours, for it takes the others with
    # it when it ends; the program runs as the second.
    _wait_for_child()
    _wait_for_child()
    world = confine.ENFORCED
  else:
    world = confine.GUARDED
  folder = os.getcwd()
  nothing = os.open(os.devnull, os.O_RDWR)
  os.dup2(nothing, 0)
  confine.limit(
    confine.Limits(
      memory_bytes=order["memory_bytes"],
      cpu_s=order["cpu_s"],
      file_bytes=order["file_bytes"],
      num_files=16,
      num_processes=0,
    )
  )
  standard = os.path.dirname(os.__file__)
  readable = [standard, *_SYSTEM]
  if order["use_namespaces"]:
    files = confine.leave_files(readable=readable, writable=[folder])
  else:
    files = confine.guard_files(readable=readable, writable=[folder])
  confine.drop_privileges(may_read=files == confine.ENFORCED)
  if world == confine.GUARDED:
    confine.guard_network()
    confine.guard_processes()
  status = order["status_descriptor"]
  os.write(status, json.dumps({"world": world, "files": files}).encode())
  os.close(status)
  # What went wrong before is for our user; what a program complains of is not.
  os.dup2(nothing, 2)
  os.close(nothing)
  sys.path[:] = [standard, os.path.join(standard, "lib-dynload")]
  exec(
    compile(order["program"], "<completion>", "exec"), {"__name__": "__main__"}
  )


def _wait_for_child() -> None:
  """Forks; the parent waits for the child, and ends as it does."""
  child = os.fork()
  if child == 0:
    confine.end_with_parent()
    return
  _, status = os.waitpid(child, 0)
  # As a shell tells of a death by signal.
  code = os.waitstatus_to_exitcode(status)
  os._exit(code if code >= 0 else 128 - code)
