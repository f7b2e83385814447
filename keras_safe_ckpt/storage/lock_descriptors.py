"""Open lock files, and what becomes of them when the process forks.

A forked child shares the open files of its parent, and with them the locks: a
lock would outlive the parent that took it, and the child could release it. So
the child closes (never unlocks) every one that was open at the fork.

They are objects of Python rather than numbers: to close one twice does no harm,
and one that a Ctrl-C has kept from its owner closes itself.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
import weakref

from keras_safe_ckpt.errors import (
    CheckpointWriteError,
    LocksUnsupportedError,
    SafeCheckpointError,
    UnsafePathError,
)
from keras_safe_ckpt.storage.temp_names import new_temp_name

_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
#: It is not the file system that cannot lock.
_OF_THE_MOMENT = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)

_files: weakref.WeakSet[io.FileIO] = weakref.WeakSet()
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
    for file in list(_files):
        with contextlib.suppress(OSError):
            file.close()
    _files.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


def open_lock_file(path: str) -> io.FileIO:
    """Open for locking, created if need be, never truncated, never through a symbolic link.

    Example::

        file = open_lock_file("/data/.model.keras.lock")
    """
    with _mutex:
        try:
            file = _opened(path, 0)
        except FileNotFoundError:
            # O_CREAT only now: in a sticky directory such as /tmp the kernel refuses
            # it (fs.protected_regular) for an existing file of another user.
            file = _opened(path, os.O_CREAT, 0o666)
        _files.add(file)
        return file


def open_probe_file(directory: str) -> tuple[io.FileIO, str]:
    """Create and open a file with a name of its own; the caller removes it.

    It is named as temporary files are, so that it is swept if the process dies meanwhile.
    """
    path = os.path.join(directory, new_temp_name("probe"))
    with _mutex:
        file = _opened(path, os.O_CREAT | os.O_EXCL, 0o600)
        _files.add(file)
        return file, path


def close_lock_file(file: io.FileIO) -> None:
    """Close what one of the functions above opened; nothing happens the second time."""
    with _mutex:
        # Whatever the system says, it is closed. It was unlocked before, and nothing in it counts.
        with contextlib.suppress(OSError):
            file.close()
        _files.discard(file)


def _opened(path: str, flags: int, mode: int = 0) -> io.FileIO:
    # One step for the interpreter: a Ctrl-C during os.open is raised right after it, and in
    # FileIO(os.open(...)) that is before anybody owns the descriptor.
    descriptors = map(os.open, (path,), (_OPEN_FLAGS | flags,), (mode,))
    return next(map(io.FileIO, descriptors, ("r+",)))


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
    if cause.errno in _OF_THE_MOMENT:
        return CheckpointWriteError(path, cause)
    missing = os.path.dirname(path)
    # In /proc it is there, and no file can be made in it.
    if cause.errno == errno.ENOENT and not os.path.isdir(missing):
        return LocksUnsupportedError(path, f"the directory {missing!r} does not exist")
    if cause.errno is None:
        return LocksUnsupportedError(path, str(cause))
    name = errno.errorcode.get(cause.errno, str(cause.errno))
    return LocksUnsupportedError(path, f"{os.strerror(cause.errno)} ({name})")
