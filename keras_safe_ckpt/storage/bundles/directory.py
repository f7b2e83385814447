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
    CorruptCheckpointError,
    LocksUnsupportedError,
    UnreadableCheckpointError,
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
from keras_safe_ckpt.storage.locks import LockManager
from keras_safe_ckpt.storage.paths import absolute
from keras_safe_ckpt.storage.publishing import LOCK_NAME

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
        meta_suffix: str = "meta",
    ) -> None:
        self.path = absolute(directory)
        if self.path.exists() and not self.path.is_dir():
            raise UnsafePathError(self.path, "it is a file, and a directory was expected")
        self.locks: Locks = LockManager() if locks is None else locks
        self.state_name = state_name
        self.meta_suffix = meta_suffix
        self.events = EventLog(self.path)
        #: Published by this process, and not in the state file: a full disk, say.
        self.unrecorded: dict[str, float] = {}

    def ensure_usable(self) -> None:
        """Find out now what a save would find out later."""
        ensure_writable(self.path)
        self.locks.check(self.path)

    # Locks.

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing is deleted or replaced meanwhile."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self.locks.shared(self.path / _READERS))
            except LocksUnsupportedError:
                # Whoever may not write here, or has nothing to read yet, cannot lock either.
                if self.path.is_dir() and os.access(self.path, os.W_OK):
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
        return read_state(self.path, self.state_name)

    def keep_state(self, state: State) -> None:
        """Its newest one is the latest for TensorFlow."""
        write_state(self.path, state, next(reversed(state.listed)), self.state_name)

    def ordered(self, family: Family | None) -> list[Bundle]:
        """All of a family (None: of all) that have an index, the oldest first."""
        times = {
            name: self._time_of(name)
            for name, kinds in self.parts().items()
            if INDEX in kinds and (family is None or family.includes(name))
        }
        state = self.state()
        order = [name for name in state.listed if name in times] if state else []
        unlisted = [name for name in times if name not in order]
        # The state file may be missing, cut off, of another day, or a copy.
        numbers = {name: family.number(name) if family else 0 for name in unlisted}
        for name in sorted(unlisted, key=lambda name: (times[name], numbers[name])):
            position = len(order)
            while position and times[order[position - 1]] > times[name]:
                position -= 1
            order.insert(position, name)
        return [Bundle(self.path, name) for name in order]

    def whole(self, family: Family | None) -> Iterator[Bundle]:
        """Those whose parts are whole, the newest first; the others are said."""
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
        except (
            CheckpointNotFoundError,
            CorruptCheckpointError,
            UnreadableCheckpointError,
        ) as error:
            self.events.report_skip(Path(bundle.prefix), str(error))
            return False
        return True

    def _time_of(self, name: str) -> float:
        try:
            return os.stat(Bundle(self.path, name).index).st_mtime
        except OSError:
            return 0.0
