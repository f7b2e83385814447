"""Locks that are files: ``LockManager``.

The lock for ``model.keras`` is the side file ``.model.keras.lock``, locked with
``flock`` and never removed. A second file, ``.model.keras.gate``, is the queue:
everybody takes the gate, then the lock, then lets the gate go. Whoever is at
the gate is therefore next, and a stream of readers cannot starve a writer.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import stat
import time
from contextlib import AbstractContextManager
from typing import Any

from portalocker import LockFlags
from portalocker.exceptions import AlreadyLocked, LockException
from portalocker.portalocker import FlockLocker

from keras_safe_ckpt.errors import (
    CheckpointWriteError,
    LockLostError,
    LocksUnsupportedError,
    LockTimeoutError,
    UnsafePathError,
)
from keras_safe_ckpt.storage.lock_backend import (
    HeldLock,
    Hold,
    Locks,
    checked_path,
    checked_timeout,
    is_locks,
)
from keras_safe_ckpt.storage.lock_descriptors import (
    close_lock_file,
    explained,
    is_at,
    open_lock_file,
    open_probe_file,
    system_error,
)
from keras_safe_ckpt.storage.lock_owner import OwnerStamp, describe_owner_of, flock_holders

#: Not portalocker.lock, which follows the global LOCKER: whoever sets that to
#: lockf would let two threads of one process hold the same lock.
_FLOCK = FlockLocker()
_EXCLUSIVE = LockFlags.EXCLUSIVE | LockFlags.NON_BLOCKING
_SHARED = LockFlags.SHARED | LockFlags.NON_BLOCKING

_FIRST_POLL_SECONDS = 0.002
_LAST_POLL_SECONDS = 0.025
#: Passing a free gate takes microseconds. Even timeout=0 waits that out, or two
#: readers who come at the same moment would turn each other away.
_GATE_GRACE_SECONDS = 0.02
#: Its own generator: drawing from the global one would change the user's shuffling.
_JITTER = random.Random()


def _try_lock(fd: int, flags: LockFlags) -> bool:
    try:
        _FLOCK.lock(fd, flags)
    except AlreadyLocked:
        return False
    return True


def _lock_by(deadline: float, fd: int, flags: LockFlags) -> bool:
    interval = _FIRST_POLL_SECONDS
    while not _try_lock(fd, flags):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        time.sleep(min(remaining, interval * _JITTER.uniform(0.5, 1.0)))
        interval = min(interval * 1.5, _LAST_POLL_SECONDS)
    return True


def _unlock_and_close(file: io.FileIO) -> None:
    if not file.closed:
        # Unlocked first: a process between fork and exec, or forked by C code, still
        # has the descriptor, and closing ours alone would leave the lock to it.
        with contextlib.suppress(LockException):
            _FLOCK.unlock(file.fileno())
    close_lock_file(file)


def claim(fd: int) -> bool:
    """Try to lock an open file exclusively, for as long as the descriptor stays open.

    True if it is ours now, False if somebody else has it. Raises ``OSError``
    where the file system cannot lock.

    Example::

        fd = os.open(temporary, os.O_RDWR)
        if claim(fd):
            os.unlink(temporary)       # its writer is gone
    """
    try:
        return _try_lock(fd, _EXCLUSIVE)
    except LockException as error:
        raise system_error(error) from None


def is_locked(fd: int) -> bool | None:
    """Whether somebody holds a lock on an open file alone; None where that cannot be told.

    It is tried for an instant, as a reader: other readers do not notice, and a writer that is
    willing to wait at all waits longer than that.
    """
    try:
        if not _try_lock(fd, _SHARED):
            return True
        _FLOCK.unlock(fd)
    except LockException:
        return None
    return False


def relax(fd: int) -> None:
    """Turn a claim into a shared lock, which still keeps others from claiming the file.

    Raises ``OSError`` where the file system cannot lock.
    """
    try:
        _try_lock(fd, _SHARED)
    except LockException as error:
        raise system_error(error) from None


class FileLock:
    """One acquisition of one lock.

    Its stages, under one deadline: open, gate, lock, verify (is the locked file
    still the one at that path?), sign (the owner record), leave the gate.
    """

    __slots__ = ("_file", "_flags", "_gate", "_pid", "_side", "_stamp", "_timeout", "path")

    def __init__(self, path: str, flags: LockFlags, timeout: float, stamp: OwnerStamp) -> None:
        directory, name = os.path.split(path)
        self.path = path
        self._side = os.path.join(directory, f".{name}")
        self._flags = flags
        self._timeout = timeout
        self._stamp = stamp
        self._file: io.FileIO | None = None
        self._gate: io.FileIO | None = None
        self._pid = -1

    def acquire(self) -> None:
        """Take the lock; what is left of it after an error, `release` gives back."""
        start = time.monotonic()
        self._pid = os.getpid()
        opening = f"{self._side}.gate"
        try:
            self._gate = open_lock_file(opening)
            opening = f"{self._side}.lock"
            self._file = open_lock_file(opening)
            self._pass_gate(start, self._gate.fileno(), self._file.fileno())
            descriptor, size = self._lock_and_verify(start, self._file.fileno())
            self._sign(descriptor, size)
            self._leave_gate()
        except (OSError, LockException) as error:
            raise explained(opening, error) from None

    def _pass_gate(self, start: float, gate: int, fd: int) -> None:
        deadline = start + max(self._timeout, _GATE_GRACE_SECONDS)
        if not _lock_by(deadline, gate, _EXCLUSIVE):
            holder = describe_owner_of(fd)
            if not flock_holders(fd):
                holder = f"another process in the queue (last held by {holder})"
            raise LockTimeoutError(self.path, holder, time.monotonic() - start)

    def _lock_and_verify(self, start: float, fd: int) -> tuple[int, int]:
        """Lock the file that is at the path; its descriptor and its size are returned."""
        path = f"{self._side}.lock"
        while True:
            if not _lock_by(start + self._timeout, fd, self._flags):
                holder = describe_owner_of(fd)
                raise LockTimeoutError(self.path, holder, time.monotonic() - start)
            status = os.fstat(fd)
            if is_at(path, status):
                break
            # Deleted or replaced since we opened it: everybody else locks the new file.
            self._unlock()
            self._file = open_lock_file(path)
            fd = self._file.fileno()
        if not stat.S_ISREG(status.st_mode):
            raise UnsafePathError(path, "it is not a regular file")
        return fd, status.st_size

    def _sign(self, fd: int, size: int) -> None:
        # Still at the gate, so that two readers do not write at once. A full disk
        # costs the message of a waiter its name, and must not cost us the lock.
        record = self._stamp.record("exclusive" if self._flags is _EXCLUSIVE else "shared")
        with contextlib.suppress(OSError):
            os.pwrite(fd, record, 0)
            if size > len(record):
                os.ftruncate(fd, len(record))

    def ensure_held(self) -> None:
        """Raise ``LockLostError`` if the lock is not ours any more."""
        if self._file is None:
            raise LockLostError(self.path, "it was released")
        if self._pid != os.getpid():
            raise LockLostError(self.path, "it is held by the parent process, not by its fork")
        fd = self._file.fileno()
        lock_file = f"{self._side}.lock"
        try:
            if not is_at(lock_file, os.fstat(fd)):
                what = "replaced" if os.path.lexists(lock_file) else "deleted"
                raise LockLostError(self.path, f"its lock file {lock_file!r} was {what}")
            # Locking again what we hold changes nothing. It fails if a network
            # file system dropped the lock and somebody else has it by now.
            if not _try_lock(fd, self._flags):
                raise LockLostError(self.path, f"taken by {describe_owner_of(fd)}")
        except (OSError, LockException) as error:
            reason = f"its lock file cannot be checked: {system_error(error)}"
            raise LockLostError(self.path, reason) from None

    def release(self) -> None:
        """Give back what is held; interrupted anywhere, it can be called once more."""
        if self._pid == os.getpid():
            self._leave_gate()
            self._unlock()
        else:
            self._gate = self._file = None  # Closed in a forked child.

    def _leave_gate(self) -> None:
        if self._gate is not None:
            _unlock_and_close(self._gate)
            self._gate = None

    def _unlock(self) -> None:
        if self._file is not None:
            _unlock_and_close(self._file)
            self._file = None


class LockManager:
    """Locks files against other threads, processes and hosts, with files beside them.

    Args:
        timeout: seconds to wait for a lock unless a call says otherwise; 0 tries once.
        worker: the name of this worker, shown to whoever waits for it in vain.

    A killed holder frees its locks at once; a forked child does not hold the
    locks of its parent. One manager serves any number of threads, and may be
    pickled and copied.

    Example::

        locks = LockManager(timeout=10)
        with locks.exclusive("results.csv") as held:
            with open("results.csv.new", "w") as file:
                file.write("1,2,3")
            held.ensure_held()
            os.replace("results.csv.new", "results.csv")
    """

    def __init__(self, *, timeout: float = 60.0, worker: str | None = None) -> None:
        self.timeout = checked_timeout(timeout)
        self.worker = None if worker is None else str(worker)
        self._stamp = OwnerStamp(self.worker)

    def __getstate__(self) -> dict[str, Any]:
        return {"timeout": self.timeout, "worker": self.worker}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stamp = OwnerStamp(self.worker)  # names the host, which may be another one now

    def __repr__(self) -> str:
        return f"LockManager(timeout={self.timeout!r}, worker={self.worker!r})"

    def exclusive(
        self, path: str | os.PathLike[str], timeout: float | None = None
    ) -> AbstractContextManager[HeldLock]:
        """Hold the lock on ``path`` alone, after waiting ``timeout`` seconds at most."""
        return self._lock(path, _EXCLUSIVE, timeout)

    def shared(
        self, path: str | os.PathLike[str], timeout: float | None = None
    ) -> AbstractContextManager[HeldLock]:
        """Hold the lock on ``path`` together with other readers, and without any writer.

        ``timeout`` as for `exclusive`.
        """
        return self._lock(path, _SHARED, timeout)

    def _lock(self, path: str | os.PathLike[str], flags: LockFlags, timeout: float | None) -> Hold:
        seconds = self.timeout if timeout is None else checked_timeout(timeout)
        return Hold(FileLock(checked_path(path), flags, seconds, self._stamp))

    def check(self, directory: str | os.PathLike[str]) -> None:
        """Raise ``LocksUnsupportedError`` now if files in ``directory`` cannot be locked.

        Some file systems refuse locks, and some grant them to everybody: both
        are better found before the training than at the first conflict.
        """
        directory = os.path.abspath(os.fsdecode(directory))
        path = os.path.join(directory, "probe")
        files = []
        try:
            file, path = open_probe_file(directory)
            files.append(file)
            files.append(open_lock_file(path))
            granted = [_try_lock(file.fileno(), _EXCLUSIVE) for file in files]
        except (OSError, LockException) as error:
            said = explained(path, error)
            if isinstance(said, CheckpointWriteError):
                raise said from None  # Another file system would not help.
            raise LocksUnsupportedError(directory, said.facts["reason"]) from None
        finally:
            for file in files:
                close_lock_file(file)
            if files:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        if not granted[0]:
            raise LocksUnsupportedError(directory, "a file that was just made is locked already")
        if granted[1]:
            reason = "two descriptors could lock the same file at once"
            raise LocksUnsupportedError(directory, reason)


def chosen_locks(locks: Locks | None, *, timeout: float = 60.0, worker: str | None = None) -> Locks:
    """What the argument ``locks`` means: itself, or for None a `LockManager`."""
    if locks is None:
        return LockManager(timeout=timeout, worker=worker)
    if not is_locks(locks):
        raise ValueError(
            f"Expected locks to be a LockManager or RedisLocks. Received: locks={locks!r}"
        )
    return locks
