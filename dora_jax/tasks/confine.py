"""Takes from a process what code that nobody has read must not have.

Limits of memory, files and processes are the kernel's, everywhere. Network,
files and other processes are out of reach by Linux's namespaces and Landlock
where these may be used without asking anybody; elsewhere Python's audit hooks
refuse them, which stops a mistake, but not somebody who means to get round
them. Each function says which of the two holds.

Only the standard library is imported here, for threads that a library starts
would forbid new namespaces. Sources: man pages setrlimit(2), unshare(2),
landlock(7), user_namespaces(7); PEP 578 for audit hooks.
"""

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import resource
import struct
import sys
from collections.abc import Iterable, Sequence

ENFORCED = "by the kernel"
GUARDED = "by Python's audit hooks alone"

_CLONE_NEWNS = 0x00020000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_SET_NO_NEW_PRIVS = 38
_CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_ADD_RULE = 445
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_PATH_BENEATH = 1
# Of version 1, which every kernel with Landlock knows: to execute, write and
# read files, list folders, and nine ways to make and remove entries.
_ALL_FILE_RIGHTS = (1 << 13) - 1
_READ_RIGHTS = 1 << 2 | 1 << 3
_FOLDERLESS_RIGHTS = 1 << 0 | 1 << 1 | 1 << 2
_NOBODY = 65534

_NETWORK_EVENTS = ("socket.",)
_PROCESS_EVENTS = (
  "ctypes.",
  "os.exec",
  "os.fork",
  "os.kill",
  "os.posix_spawn",
  "os.system",
  "signal.pthread_kill",
  "subprocess.",
)
_CHANGE_EVENTS = (
  "os.chmod",
  "os.chown",
  "os.link",
  "os.mkdir",
  "os.remove",
  "os.rename",
  "os.rmdir",
  "os.symlink",
  "os.truncate",
  "shutil.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """The most that a process may use; what is None stays as it is.

  Attributes:
    memory_bytes: of address space; Linux alone keeps to it.
    cpu_s: seconds of processor time.
    file_bytes: length of a file that it writes.
    num_files: file descriptors.
    num_processes: processes and threads of its user; 0 forbids another. The
      superuser is above it.
  """

  memory_bytes: int | None = None
  cpu_s: int | None = None
  file_bytes: int | None = None
  num_files: int | None = None
  num_processes: int | None = None


def limit(limits: Limits) -> None:
  """Lowers what this process and its children may use, for good."""
  # macOS takes a limit of address space, and then refuses every allocation.
  is_linux = sys.platform == "linux"
  wanted = (
    (resource.RLIMIT_AS, limits.memory_bytes if is_linux else None),
    (resource.RLIMIT_CPU, limits.cpu_s),
    (resource.RLIMIT_FSIZE, limits.file_bytes),
    (resource.RLIMIT_NOFILE, limits.num_files),
    (resource.RLIMIT_NPROC, limits.num_processes),
    # What a crash dumps would be as large as its memory.
    (resource.RLIMIT_CORE, 0),
  )
  for kind, most in wanted:
    if most is None:
      continue
    most = min(most, sys.maxsize)
    _, ceiling = resource.getrlimit(kind)
    if ceiling != resource.RLIM_INFINITY:
      most = min(most, ceiling)
    resource.setrlimit(kind, (most, most))


def leave_network() -> str:
  """Leaves this process without any network, loopback included.

  Call it while the process has one thread. Open descriptors stay open.

  Returns:
    ENFORCED or GUARDED.
  """
  if _unshare(_CLONE_NEWNET):
    return ENFORCED
  _refuse(_NETWORK_EVENTS)
  return GUARDED


def leave_processes() -> bool:
  """Makes the next child the first process of a world of its own.

  It, and all that it starts, sees no other process, no network, no shared
  memory and no mount made later; all of them end when it does.

  Returns:
    Whether the kernel permits it; otherwise nothing has changed.
  """
  return _unshare(_CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWNS | _CLONE_NEWIPC)


def end_with_parent() -> None:
  """Has the kernel kill this process when its parent ends; Linux alone."""
  if sys.platform == "linux":
    _libc().prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)


def drop_privileges(*, may_read: bool) -> None:
  """Gives up every capability; the superuser becomes nobody.

  Args:
    may_read: whether a superuser's process keeps the right to read files of
      others, as where Python itself lies in the superuser's home. Give it only
      where `leave_files` is enforced.
  """
  if sys.platform != "linux":
    return
  libc = _libc()
  libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
  is_superuser = os.geteuid() == 0
  if is_superuser:
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    # In a namespace for one user there is nobody else to become.
    with contextlib.suppress(OSError):
      os.setgroups([])
      os.setresgid(_NOBODY, _NOBODY, _NOBODY)
      os.setresuid(_NOBODY, _NOBODY, _NOBODY)
  kept = 1 << _CAP_DAC_READ_SEARCH if is_superuser and may_read else 0
  header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
  if libc.capset(header, struct.pack("6I", kept, kept, 0, 0, 0, 0)) != 0:
    raise OSError(ctypes.get_errno(), "Capabilities cannot be given up")


def leave_files(*, readable: Sequence[str], writable: Sequence[str]) -> str:
  """Leaves this process no file but those under these folders.

  Open descriptors stay open. Nor can it gain rights by running a program.

  Args:
    readable: folders or files to read.
    writable: folders to read and to write.

  Returns:
    ENFORCED or GUARDED.
  """
  if _landlock(readable=readable, writable=writable):
    return ENFORCED
  return guard_files(readable=readable, writable=writable)


def guard_processes() -> None:
  """Refuses to start, signal or reach into processes, by audit hooks."""
  _refuse(_PROCESS_EVENTS)


def guard_network() -> None:
  """Refuses sockets, by audit hooks."""
  _refuse(_NETWORK_EVENTS)


def _libc() -> ctypes.CDLL:
  return ctypes.CDLL(None, use_errno=True)


def _unshare(flags: int) -> bool:
  """Enters new namespaces; without the right to, in a new user namespace."""
  if sys.platform != "linux":
    return False
  libc = _libc()
  if libc.unshare(flags) == 0:
    return True
  user, group = os.geteuid(), os.getegid()
  if libc.unshare(flags | _CLONE_NEWUSER) != 0:
    return False
  # So that files keep their owners' names.
  for name, text in (
    ("setgroups", "deny"),
    ("uid_map", f"{user} {user} 1"),
    ("gid_map", f"{group} {group} 1"),
  ):
    pathlib.Path("/proc/self", name).write_text(text)
  return True


def _landlock(*, readable: Iterable[str], writable: Iterable[str]) -> bool:
  if sys.platform != "linux":
    return False
  libc = _libc()
  attributes = struct.pack("Q", _ALL_FILE_RIGHTS)
  rules = libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
  if rules < 0:
    return False
  libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
  allowed = [(path, _READ_RIGHTS) for path in readable]
  allowed += [(path, _ALL_FILE_RIGHTS & ~1) for path in writable]
  for path, rights in allowed:
    if not os.path.exists(path):
      continue
    if not os.path.isdir(path):
      rights &= _FOLDERLESS_RIGHTS
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights, descriptor)
    libc.syscall(_LANDLOCK_ADD_RULE, rules, _LANDLOCK_PATH_BENEATH, rule, 0)
    os.close(descriptor)
  is_held = libc.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0) == 0
  os.close(rules)
  return is_held


def _refuse(prefixes: tuple[str, ...]) -> None:
  def hook(event: str, _: object) -> None:
    if event.startswith(prefixes):
      raise PermissionError(f"{event} is not permitted here.")

  sys.addaudithook(hook)


def guard_files(*, readable: Sequence[str], writable: Sequence[str]) -> str:
  """Refuses files outside of these folders, by audit hooks: GUARDED."""
  writing = tuple(map(os.path.realpath, writable))
  reading = (*map(os.path.realpath, readable), *writing)

  def check(path: object, folders: tuple[str, ...]) -> None:
    if not isinstance(path, str | bytes | os.PathLike):
      return
    real = os.path.realpath(os.fsdecode(path))
    if not any(real == f or real.startswith(f + os.sep) for f in folders):
      raise PermissionError(f"{real} is not permitted here.")

  def hook(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
      path, mode, flags = arguments
      is_write = any(c in str(mode or "") for c in "wax+") or (
        isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
      )
      check(path, writing if is_write else reading)
    elif event in ("os.listdir", "os.scandir"):
      check(arguments[0] or ".", reading)
    elif event.startswith(_CHANGE_EVENTS):
      for argument in arguments:
        check(argument, writing)

  sys.addaudithook(hook)
  return GUARDED
