"""Whose turn it is at a writer: one thread of its own process at a time, and nobody within that."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


class Turn:
    """``with turn.taken():`` around whatever changes a writer.

    A signal handler runs in the middle of what its own thread is doing, where no mutex holds it
    back: half of a row would be in the file, or a record twice. It is told instead.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pid = os.getpid()
        self._mutex: Any = threading.RLock()

    @property
    def is_of_parent(self) -> bool:
        """Whether this is a forked child, which has no part in it."""
        return self._pid != os.getpid()

    def taken(self) -> AbstractContextManager[Any]:
        """The mutex, or `RuntimeError` for a signal handler and a forked child."""
        # Before the mutex, which a forked child may find taken, for ever.
        if self.is_of_parent:
            raise RuntimeError(
                f"The writer of {str(self._path)!r} belongs to process {self._pid}; make one in "
                f"each process. This is process {os.getpid()}."
            )
        # Asked of the mutex itself, which no Ctrl-C keeps from being given back. A flag of ours, or
        # an ``__exit__`` in Python, could be left behind by one.
        if self._mutex._is_owned():
            raise RuntimeError(
                f"{str(self._path)!r} is being written by this very thread: a signal handler "
                "cannot do that as well. Let it set a flag instead."
            )
        return self._mutex  # type: ignore[no-any-return]
