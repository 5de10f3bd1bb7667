import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from dora_jax import types
from dora_jax.tasks import reward_pool

ODD = "odd_rewards:behave"


def make_prompt(answer="7", num_tokens=3):
  return types.Prompt(
    prompt_id=0,
    tokens=np.arange(num_tokens, dtype=np.int32),
    text="3+4=",
    answer=answer,
  )


def make_pool(
  reward=ODD,
  num_workers=2,
  timeout_s=30.0,
  memory_bytes=2 << 30,
  has_network=False,
  retries=0,
  **reward_kwargs,
):
  return reward_pool.RewardPool(
    reward=reward,
    reward_kwargs=reward_kwargs,
    num_workers=num_workers,
    timeout_s=timeout_s,
    memory_bytes=memory_bytes,
    has_network=has_network,
    retries=retries,
  )


def drain(pool):
  """Every pending result, by job."""
  results = []
  while pool.num_pending:
    results += pool.poll(60.0)
  assert len({result.job for result in results}) == len(results)
  return {result.job: result for result in results}


def children():
  """Ids of the live child processes of this one."""
  tasks = pathlib.Path("/proc/self/task")
  if not tasks.is_dir():
    pytest.skip("needs /proc")
  files = [path / "children" for path in tasks.iterdir()]
  return {int(pid) for file in files for pid in file.read_text().split()}


def test_scores_equal_those_computed_here():
  completions = ["7", " 7\n", "8", "", "77"]
  with make_pool("exact_match") as pool:
    for member, completion in enumerate(completions):
      pool.submit((5, member), make_prompt(), completion)
    assert pool.num_pending == 5
    results = drain(pool)
  rewards = [results[5, m].reward for m in range(5)]
  assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0]
  assert all(result.error is None for result in results.values())


def test_failure_is_an_error_and_never_a_reward():
  expected = {
    "raise": "KeyError: 'no such unit'",
    "die": "worker died (signal 9)",
    "exit": "SystemExit: 3",
    "exit at once": "worker died (exit status 3)",
    "nan": "is nan, but it must be finite",
    "inf": "is inf, but it must be finite",
    "str": "is '1' of type str",
    "bool": "is True of type bool",
    "none": "is None of type NoneType",
    "partless": "['format'] without 'reward'",
    "numbered": "a component named 7 of type int",
    "huge": "is 1e+300, but its size must be at most 3.4e+38",
    "list": "is [1.0, 1.0] of type list",
    "memory": "MemoryError",
    "files": "Too many open files",
    "network": "rror",
  }
  before = children()
  with make_pool() as pool:
    for name in expected:
      pool.submit(name, make_prompt(), name)
    results = drain(pool)
    for name, words in expected.items():
      assert results[name].reward is None
      assert words in results[name].error, results[name].error
    for name in ("one", "length", "parts", "jax", "interrupt", "folder"):
      pool.submit(name, make_prompt(), name)
    results = drain(pool)
    assert len(children() - before) == 2
  assert {name: result.reward for name, result in results.items()} == {
    "one": 1.0,
    "length": 3.0,
    "parts": 0.5,
    "jax": 0.0,  # A worker that held JAX would be slow, and hold a device.
    "interrupt": 1.0,  # Ctrl-C is the parent's.
    "folder": 1.0,  # It works in an empty one.
  }
  assert results["parts"].components == {"format": 1.0}


def test_a_worker_that_leaks_is_replaced_before_it_spoils_what_comes_next():
  with make_pool(num_workers=1) as pool:
    for job in range(6):
      pool.submit(job, make_prompt(), "leak")
      pool.submit(("after", job), make_prompt(), "folder")
    for name in ("files", "memory"):
      pool.submit(name, make_prompt(), name)
      pool.submit(("after", name), make_prompt(), "folder")
    results = drain(pool)
    # Of 256 descriptors, two leaks of 100 leave fewer than half.
    assert pool.num_replaced == 3 + 2
  failed = {job for job, result in results.items() if result.reward is None}
  assert failed == {"files", "memory"}


def test_hanging_jobs_time_out_and_leave_the_pool_whole():
  before = children()
  with make_pool(timeout_s=0.5) as pool:
    for job in range(4):
      text = "hang with a child" if job % 2 else "hang"
      pool.submit(job, make_prompt(), text)
    pool.submit("after", make_prompt(), "one")
    results = drain(pool)
    assert len(children() - before) == 2
  for job in range(4):
    assert results[job].reward is None
    assert "timed out after 0.5 s" in results[job].error
  assert results["after"].reward == 1.0
  assert children() == before


def test_reply_in_time_counts_however_late_it_is_read():
  with make_pool(num_workers=1, timeout_s=0.5) as pool:
    pool.submit("early", make_prompt(), "one")
    (worker,) = pool._workers
    assert worker.channel.poll(10.0)
    worker.deadline_s = 0.0
    (result,) = pool.poll(0.0)
  assert result.reward == 1.0


def test_worker_that_dies_while_free_is_replaced():
  with make_pool(num_workers=1) as pool:
    (worker,) = pool._workers
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    pool.submit("job", make_prompt(), "one")
    assert drain(pool)["job"].reward == 1.0


def test_worker_ends_with_its_parent():
  program = (
    "import numpy as np, os\n"
    "from dora_jax import types\n"
    "from dora_jax.tasks import reward_pool\n"
    "pool = reward_pool.RewardPool(reward='exact_match', reward_kwargs={},"
    " num_workers=1, timeout_s=30.0, retries=0, memory_bytes=2 << 30,"
    " has_network=False)\n"
    "print(pool._workers[0].process.pid, flush=True)\n"
    "os._exit(0)\n"
  )
  # The worker inherits the pipe, so reading to its end waits for the worker.
  done = subprocess.run(
    [sys.executable, "-c", program],
    stdout=subprocess.PIPE,
    timeout=60,
    check=True,
  )
  assert not pathlib.Path(f"/proc/{int(done.stdout)}/exe").exists()


def test_start_fails_with_the_name_and_the_nearest():
  with pytest.raises(RuntimeError, match="Did you mean 'exact_match'"):
    make_pool("exact_mach")
  with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
    make_pool("no_such_module:reward")
  with pytest.raises(RuntimeError, match=r"'hov'\. Did you mean 'how'"):
    make_pool(hov="one")
  with pytest.raises(ValueError, match="reward_workers is 0"):
    make_pool(num_workers=0)


def test_job_names_are_unique_while_pending_and_closed_pools_refuse():
  pool = make_pool(num_workers=1)
  pool.submit("job", make_prompt(), "one")
  with pytest.raises(ValueError, match="'job' is already pending"):
    pool.submit("job", make_prompt(), "one")
  drain(pool)
  pool.submit("job", make_prompt(), "one")
  pool.close()
  pool.close()
  with pytest.raises(RuntimeError, match="closed"):
    pool.submit("job", make_prompt(), "one")


def test_math_verify_works_in_the_pool():
  with make_pool("math_verify", num_workers=1) as pool:
    for completion in ("so \\boxed{0.5}", "so \\boxed{0.6}", "no idea"):
      pool.submit(completion, make_prompt("\\frac{1}{2}"), completion)
    pool.submit("answerless", make_prompt(" "), "7")
    results = drain(pool)
  assert results["so \\boxed{0.5}"].reward == 1.0
  assert results["so \\boxed{0.6}"].reward == 0.0
  assert results["no idea"].reward == 0.0
  assert results["no idea"].components == {"parsed": 0.0}
  assert "is no mathematics" in results["answerless"].error


def test_what_failed_is_tried_again_and_given_up_after_the_last_try(tmp_path):
  reward = "odd_rewards:wait_for_second_try"
  with make_pool(
    reward, num_workers=1, retries=1, folder=str(tmp_path)
  ) as pool:
    for kind in ("raise", "die", "nan", "raise twice"):
      pool.submit(kind, make_prompt(), kind)
    results = drain(pool)
    assert pool.num_replaced == 1
  assert {result.num_tries for result in results.values()} == {2}
  failed = results.pop("raise twice")
  assert {result.reward for result in results.values()} == {1.0}
  assert failed.reward is None and "KeyError: 'raise twice'" in failed.error


@pytest.mark.slow
def test_the_pool_is_as_large_after_many_timeouts_as_before():
  before = children()
  with make_pool(timeout_s=0.02, retries=1) as pool:
    for job in range(100):
      pool.submit(
        job, make_prompt(), "hang with a child" if job % 5 else "hang"
      )
    results = drain(pool)
    assert len(children() - before) == 2
    assert pool.num_replaced == 200
  assert all("timed out" in result.error for result in results.values())
  assert children() == before
