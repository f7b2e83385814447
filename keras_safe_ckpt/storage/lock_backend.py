"""What every lock backend offers, and what all of them share.

A backend is any object with the three methods of :class:`Locks`; pass it as
``locks=`` wherever the library shares a file. Two come with it: ``LockManager``
(lock files beside the data) and ``RedisLocks`` (a lock server, for file systems
that do not lock).
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
from collections.abc import Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from keras_safe_ckpt.errors import LockLostError, UnsafePathError


class HeldLock(Protocol):
    """What ``with locks.exclusive(path) as held:`` yields."""

    @property
    def path(self) -> str:
        """What is locked."""

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
    ) -> AbstractContextManager[HeldLock]:
        """Hold the lock on ``path`` alone; None waits as long as the backend was told to."""

    def shared(
        self, path: str | os.PathLike[str], timeout: float | None = None
    ) -> AbstractContextManager[HeldLock]:
        """Hold it together with other readers, and without any writer."""

    def check(self, directory: str | os.PathLike[str]) -> None:
        """Raise now if nothing can be locked there."""


def is_locks(value: Any) -> bool:
    """Whether it has the methods of a lock backend; the class of one cannot lock."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("exclusive", "shared", "check")
    )


class Acquisition(HeldLock, Protocol):
    """One lock as a backend takes it and gives it back; any number of times, one at a time."""

    def acquire(self) -> None:
        """Take it. After an error `release` gives back what was taken until then."""

    def release(self) -> None:
        """Give everything back that is held, however little; `LockLostError` if it was lost.

        Interrupted at any point, it can be called again and does the rest.
        """


class Hold:
    """The context manager that backends hand out for an `Acquisition`.

    Ctrl-C can strike between ``__enter__`` and the body, where no ``__exit__`` follows. Then the
    lock is given back when this object is dropped. A generator does that, rather than a
    ``__del__``: Python ignores what is raised in one, and a Ctrl-C at that moment would be lost,
    at every lock that is taken. Dropping a generator that has come to its end runs no code.
    """

    __slots__ = ("_acquisition", "_keeper")

    def __init__(self, acquisition: Acquisition) -> None:
        self._acquisition = acquisition
        self._keeper: Generator[None, None, None] | None = None

    def __enter__(self) -> HeldLock:
        if self._keeper is not None:
            path = self._acquisition.path
            raise RuntimeError(f"This object holds the lock on {path!r} already.")
        keeper = _released_when_dropped(self._acquisition)
        next(keeper)
        self._keeper = keeper
        try:
            self._acquisition.acquire()
        except BaseException:
            self._end(keeper)
            raise
        return self._acquisition

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        keeper = self._keeper
        try:
            self._acquisition.release()
        except LockLostError:
            # An error of the body says more than the loss that may have caused it.
            if kind is None:
                raise
        finally:
            if keeper is not None:
                self._end(keeper)

    def _end(self, keeper: Generator[None, None, None]) -> None:
        # It releases once more: a Ctrl-C in the first release must not keep the lock.
        keeper.close()
        self._keeper = None


def _released_when_dropped(acquisition: Acquisition) -> Generator[None, None, None]:
    try:
        yield
    finally:
        with contextlib.suppress(LockLostError):
            acquisition.release()


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
