"""Open lock files, and what becomes of them when the process forks.

A forked child shares the open files of its parent, and with them the locks: a
lock would outlive the parent that took it, and the child could release it. So
the child closes (never unlocks) every descriptor that was open at the fork.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading

from keras_safe_ckpt.errors import LocksUnsupportedError, SafeCheckpointError, UnsafePathError
from keras_safe_ckpt.storage.temp_names import new_temp_name

_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW

_descriptors: set[int] = set()
# Makes "open and remember" one step: os.open lets other threads run, and one
# that forked at that moment would give its child a descriptor nobody knows of.
# Re-entrant, because a signal handler may fork in the middle of that step.
_mutex = threading.RLock()


def _before_fork() -> None:
    _mutex.acquire()


def _after_fork_in_parent() -> None:
    _mutex.release()


def _after_fork_in_child() -> None:
    global _mutex
    _mutex = threading.RLock()  # the old one belongs to a thread of the parent
    for fd in _descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
    _descriptors.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


def open_lock_file(path: str) -> int:
    """Open for locking, created if need be, never truncated, never through a symbolic link.

    Example::

        fd = open_lock_file("/data/.model.keras.lock")
    """
    with _mutex:
        try:
            fd = os.open(path, _OPEN_FLAGS)
        except FileNotFoundError:
            # O_CREAT only now: in a sticky directory such as /tmp the kernel refuses
            # it (fs.protected_regular) for an existing file of another user.
            fd = os.open(path, _OPEN_FLAGS | os.O_CREAT, 0o666)
        _descriptors.add(fd)
        return fd


def open_probe_file(directory: str) -> tuple[int, str]:
    """Create and open a file with a name of its own; the caller removes it.

    It is named as temporary files are, so that it is swept if the process dies meanwhile.
    """
    path = os.path.join(directory, new_temp_name("probe"))
    with _mutex:
        fd = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        _descriptors.add(fd)
        return fd, path


def close_lock_file(fd: int) -> None:
    """Close a descriptor that one of the functions above opened."""
    with _mutex:
        # Forgotten before its number can be given to another file.
        _descriptors.discard(fd)
        os.close(fd)


def is_at(path: str, opened: os.stat_result) -> bool:
    """Is the opened file still the one that others find at this path?"""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return found.st_ino == opened.st_ino and found.st_dev == opened.st_dev


def system_error(error: Exception) -> OSError:
    """What the system call said; portalocker's errors keep it as their first argument."""
    cause = error if isinstance(error, OSError) or not error.args else error.args[0]
    return cause if isinstance(cause, OSError) else OSError(str(error))


def explained(path: str, error: Exception) -> SafeCheckpointError:
    """The error to raise for a lock file that could not be opened or locked."""
    if isinstance(error, SafeCheckpointError):
        return error
    cause = system_error(error)
    if cause.errno == errno.ELOOP:
        return UnsafePathError(path, "a symbolic link is where the lock file should be")
    if cause.errno == errno.EISDIR:
        return UnsafePathError(path, "a directory is where the lock file should be")
    if cause.errno == errno.ENOENT:
        missing = os.path.dirname(path)
        return LocksUnsupportedError(path, f"the directory {missing!r} does not exist")
    if cause.errno is None:
        return LocksUnsupportedError(path, str(cause))
    name = errno.errorcode.get(cause.errno, str(cause.errno))
    return LocksUnsupportedError(path, f"{os.strerror(cause.errno)} ({name})")
