"""A directory with checkpoints of TensorFlow that any number of processes save to and read from.

One lock is for those who publish, for milliseconds; another one is shared by those who read, and
asked for alone by whoever deletes. A checkpoint is written to a folder of its own, which stands
there until all is done: what a killed process has left half-way is told by it, and put right by
the next save.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
    LocksUnsupportedError,
    UnsafePathError,
)
from keras_safe_ckpt.storage.atomic import ensure_writable
from keras_safe_ckpt.storage.bundles.bundle import Bundle
from keras_safe_ckpt.storage.bundles.family import Family
from keras_safe_ckpt.storage.bundles.files import INDEX, find_parts
from keras_safe_ckpt.storage.bundles.state_file import (
    DEFAULT_NAME,
    State,
    read_state,
    write_state,
)
from keras_safe_ckpt.storage.events import EventLog
from keras_safe_ckpt.storage.lock_backend import HeldLock, Locks
from keras_safe_ckpt.storage.locks import chosen_locks
from keras_safe_ckpt.storage.paths import absolute
from keras_safe_ckpt.storage.publishing import LOCK_NAME
from keras_safe_ckpt.storage.translation import reading_only

_log = logging.getLogger(__name__)

_READERS = f"{LOCK_NAME}-readers"


class BundleDirectory:
    """``state_name`` is the file in which TensorFlow looks for what is there."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        locks: Locks | None = None,
        state_name: str = DEFAULT_NAME,
        meta_suffix: str | None = None,
    ) -> None:
        absolute(directory)  # Refuses what is no path of a file system.
        # One directory has one lock, however it is called.
        self.path = Path(os.path.realpath(directory))
        with reading_only(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise UnsafePathError(self.path, "it is a file, and a directory was expected")
        self.locks: Locks = chosen_locks(locks)
        self.state_name = state_name
        self.meta_suffix = meta_suffix
        self.events = EventLog(self.path)

    def ensure_usable(self) -> None:
        """Find out now what a save would find out later."""
        ensure_writable(self.path)
        self.locks.check(self.path)

    # Locks.

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing is deleted or replaced meanwhile (`recovery.reading` looks for wrecks, too)."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self.locks.shared(self.path / _READERS))
            except (LocksUnsupportedError, CheckpointWriteError):
                # Whoever may not write here, has a full disk or nothing to read yet, cannot make
                # the file; a file that is there and cannot be locked is another matter.
                if os.access(self.path / f".{_READERS}.lock", os.W_OK):
                    raise
            yield

    def without_readers(
        self, seconds: float | None = None
    ) -> contextlib.AbstractContextManager[HeldLock]:
        """Wait for those who read; a new one waits until this is done."""
        return self.locks.exclusive(self.path / _READERS, seconds)

    # What is there.

    def parts(self) -> dict[str, list[str]]:
        """All files of checkpoints, whole or not."""
        return find_parts(self.path, self.meta_suffix)

    def state(self) -> State | None:
        """None if nothing is listed; `OSError` if that cannot be told now."""
        return read_state(self.path, self.state_name)

    def keep_state(self, state: State) -> None:
        """Its newest one is the latest for TensorFlow."""
        write_state(self.path, state, next(reversed(state.listed)), self.state_name)

    def ordered(self, family: Family | None) -> list[Bundle]:
        """All of a family (None: of all) that have an index, the oldest first."""
        times = {
            name: self.time_of(name)
            for name, kinds in self.parts().items()
            if INDEX in kinds and (family is None or family.includes(name))
        }
        numbers = {name: family.number(name) if family else -1 for name in times}
        state = self.state()
        listed = [name for name in state.listed if name in times] if state else []
        others = sorted(times.keys() - set(listed), key=lambda name: (times[name], numbers[name]))
        older: list[str] = []
        newer: list[str] = []
        for name in others:
            # Kept for ever, or newer than a state file that is of another day? In a copy, files
            # may have any time: then the number tells.
            is_newer = not listed or (
                times[name] > times[listed[-1]] and not 0 <= numbers[name] < numbers[listed[-1]]
            )
            (newer if is_newer else older).append(name)
        return [Bundle(self.path, name) for name in (*older, *listed, *newer)]

    def whole(self, family: Family | None) -> Iterator[Bundle]:
        """Those whose parts are whole, the newest first; the others are said.

        `UnreadableCheckpointError` for one that cannot be read now: it may be whole.
        """
        for bundle in reversed(self.ordered(family)):
            if self.is_whole(bundle):
                yield bundle

    def is_whole(self, bundle: Bundle, *, thoroughly: bool = False) -> bool:
        """Whether all parts are there, or (``thoroughly``) every byte is what it was."""
        try:
            if thoroughly:
                bundle.verify()
            else:
                bundle.check()
        except (CheckpointNotFoundError, CorruptCheckpointError) as error:
            self.events.report_skip(Path(bundle.prefix), str(error))
            return False
        return True

    def time_of(self, name: str) -> float:
        """When it was published; 0 for one without an index.

        `OSError` if that cannot be told now: the newest one would count as the oldest.
        """
        try:
            return Bundle(self.path, name).index.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def has_file(self, name: str) -> bool:
        """One of the first version of the format is a file of that very name."""
        return (self.path / name).is_file()
