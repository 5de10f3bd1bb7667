"""Programs that a policy writes: what they may not do, by either guarantee."""

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from dora_jax import types
from dora_jax.tasks import code_reward, confine, rewards

_TRY = "try:\n  {}\nexcept BaseException as e:\n  print(type(e).__name__)"
# What a program tries; what it prints, or how it ends, where it is held.
_ATTEMPTS = {
  "a process": ("import os; os.fork(); print('forked')", "Error"),
  "memory": ("x = bytearray(1 << 30); print(len(x))", "MemoryError"),
  "a secret": (f"print(open({str(pathlib.Path(__file__))!r}).read())", "Error"),
  "a folder": ("import os; print(os.listdir('/'))", "PermissionError"),
  "a file outside": ("open('/tmp/escaped', 'w'); print('made')", "Error"),
  "the network": (
    "import socket; socket.create_connection(('127.0.0.1', 9)); print(1)",
    "Error",
  ),
  "its parent": (
    "import os; os.kill(os.getppid(), 0); print('reached')",
    "Error",
  ),
  "everybody": ("import os; os.kill(-1, 0); print('reached')", "Error"),
  "a program": (
    "import subprocess; print(subprocess.run(['/bin/echo', 'ran']))",
    "Error",
  ),
}


def _run(program: str, *, use_namespaces=True, timeout_s=20.0):
  return code_reward.run_program(
    program,
    timeout_s=timeout_s,
    memory_bytes=512 << 20,
    use_namespaces=use_namespaces,
  )


@pytest.mark.parametrize("use_namespaces", [True, False])
def test_a_program_gets_what_it_needs_and_nothing_else(use_namespaces):
  for what, (attempt, ending) in _ATTEMPTS.items():
    found = _run(_TRY.format(attempt), use_namespaces=use_namespaces)
    assert found.output.strip().endswith(ending), (what, found)
  kept = "open('x', 'w').write('7'); print(open('x').read())"
  assert _run(kept, use_namespaces=use_namespaces).output == "7\n"
  held = _run("print(7)", use_namespaces=use_namespaces)
  assert held.world in (confine.ENFORCED, confine.GUARDED)
  if not use_namespaces:
    assert held.world == held.files == confine.GUARDED
  assert not pathlib.Path("/tmp/escaped").exists()


def test_a_program_ends_at_its_limits():
  endless = _run("while True: pass", timeout_s=0.5)
  assert endless.exit_status is None and endless.output == ""
  wordy = _run("while True: print('x' * 99)")
  assert wordy.exit_status not in (0, None) and len(wordy.output) <= 1 << 16
  assert _run("import os; os.abort()").exit_status != 0
  assert _run("this is no program").exit_status == 1


def test_the_reward_is_for_what_is_printed():
  prompt = types.Prompt(
    prompt_id=0, tokens=np.zeros((0,), np.int32), text="", answer="12"
  )

  def reward(completion):
    return dict(code_reward.code_output(prompt, completion))

  assert reward("print(3 * 4)") == {"reward": 1.0, "ran": 1.0}
  fenced = "First:\n```python\nprint(1)\n```\nNo:\n```\nprint(12)\n```\n"
  assert reward(fenced) == {"reward": 1.0, "ran": 1.0}
  assert reward("print(13)") == {"reward": 0.0, "ran": 1.0}
  assert reward("print(12); raise ValueError") == {"reward": 0.0, "ran": 0.0}
  assert reward("") == {"reward": 0.0, "ran": 1.0}
  assert rewards.build("code_output", {"timeout_s": 30.0})


def test_a_program_ends_with_whoever_runs_it(tmp_path):
  if not sys.platform.startswith("linux"):
    pytest.skip("by Linux's parent-death signal")
  script = (
    "from dora_jax.tasks import code_reward\n"
    "code_reward.run_program('while True: pass', timeout_s=60.0,"
    " memory_bytes=1 << 29)\n"
  )
  read, write = os.pipe()
  with subprocess.Popen(
    [sys.executable, "-c", script], pass_fds=[write], stderr=write
  ) as process:
    os.close(write)
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():
      assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
  # Its programs hold the other end: reading to the end waits for all of them.
  with os.fdopen(read, "rb") as pipe:
    pipe.read()
