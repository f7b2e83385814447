"""What every lock backend offers, and the checks that all of them share.

A backend is any object with the three methods of :class:`Locks`; pass it as
``locks=`` wherever the library shares a file. Two come with it: ``LockManager``
(lock files beside the data) and ``RedisLocks`` (a lock server, for file systems
that do not lock).
"""

from __future__ import annotations

import math
import numbers
import os
from contextlib import AbstractContextManager
from typing import Protocol

from keras_safe_ckpt.errors import UnsafePathError


class HeldLock(Protocol):
    """What ``with locks.exclusive(path) as held:`` yields."""

    @property
    def path(self) -> str: ...

    def ensure_held(self) -> None:
        """Raise ``LockLostError`` or ``StaleHolderError`` unless the lock is still ours.

        To be called right before a commit: a lock can be lost while its holder
        is paused, and the holder is the last to know.
        """


class Locks(Protocol):
    """A lock backend.

    Example::

        def publish(locks: Locks, path: str) -> None:
            with locks.exclusive(path) as held:
                ...                    # read the incumbent, decide
                held.ensure_held()
                os.replace(temporary, path)
    """

    def exclusive(
        self, path: str | os.PathLike[str], timeout: float | None = None
    ) -> AbstractContextManager[HeldLock]: ...

    def shared(
        self, path: str | os.PathLike[str], timeout: float | None = None
    ) -> AbstractContextManager[HeldLock]: ...

    def check(self, directory: str | os.PathLike[str]) -> None: ...


def checked_timeout(timeout: object) -> float:
    """The timeout in seconds, or ``ValueError`` with what was received instead."""
    # bool is a Real, and timeout=True is a mistake rather than one second.
    # NaN compares false with everything, so a deadline of NaN would never pass.
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, numbers.Real)
        or math.isnan(timeout)
        or timeout < 0
    ):
        raise ValueError(
            f"timeout must be a number of seconds, zero or more. Received: timeout={timeout!r}"
        )
    return float(timeout)


def checked_path(path: str | os.PathLike[str]) -> str:
    """The absolute path of what is locked, refused where it is not plainly a file name."""
    name = os.fsdecode(path)
    if "\0" in name:
        raise UnsafePathError(name, "it contains a NUL byte")
    if ".." in name and ".." in name.split(os.sep):
        directory, last = os.path.split(name)
        if last == "..":
            raise UnsafePathError(name, "it names no file")
        # Asked of the system: a/link/../b is not a/b when link is symbolic, and two
        # spellings of one file must not become two locks.
        name = os.path.join(os.path.realpath(directory), last)
    absolute = os.path.abspath(name)
    if not name or absolute == os.sep:
        raise UnsafePathError(name, "it names no file")
    # Absolute, so that a chdir while the lock is held does not look like a lost lock.
    return absolute
