"""An HDF5 file on its way to its name: after a crash it is what it was at the last flush.

It is written as ``.NAME.unfinished`` and has its name when it is finished. What a crash has left
there is gone on with, or set aside as ``.NAME.interrupted`` until a finished file is there.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py

from keras_safe_ckpt.datasets.tables import Tables
from keras_safe_ckpt.datasets.worker_files import interrupted_of, rows_in, unfinished_of
from keras_safe_ckpt.errors import (
    CheckpointWriteError,
    CorruptCheckpointError,
    UnreadableCheckpointError,
)
from keras_safe_ckpt.storage.atomic import sweep_orphans
from keras_safe_ckpt.storage.formats.format import NOT_ITS_FAULT
from keras_safe_ckpt.storage.journaled_file import JournaledFile, journal_of, recover
from keras_safe_ckpt.storage.paths import (
    closed_as,
    refuse_unsafe_target,
    sync_directory,
)

_log = logging.getLogger(__name__)

#: Changes that wait in memory for a commit; with more of them there is one at once.
_MOST_WAITING_BYTES = 64 << 20
#: At once, of a file that is gone on with.
_COPIED_BYTES = 8 << 20
#: What h5py raises, and what comes out of it when there is no memory; these very types.
_OF_HDF5 = (OSError, RuntimeError, ValueError, TypeError, KeyError, MemoryError, SystemError)


class GrowingFile:
    """Whoever makes one holds the exclusive lock on ``target``."""

    def __init__(self, target: Path, *, resume: bool) -> None:
        self.target = target
        self._work = unfinished_of(target)
        refuse_unsafe_target(target)
        with self._translated(None):
            #: What was given to the last `flush` of what it goes on with.
            self.note = b""
            sweep_orphans(target.parent)
            is_resumed = self._made_ready(resume)
            self._file = JournaledFile(self._work, closed_as(target))
        try:
            with self._translated(self._file):
                self.h5 = self._opened("r+" if is_resumed else "w")
            self.tables = Tables(self.h5, self._in_hdf5)
        except BaseException:
            self._file.close()
            raise
        _open_files.add(self)

    def append(
        self,
        name: str,
        rows: Any,
        compression: str | int | None = None,
        attributes: Mapping[str, Any] | None = None,
        *,
        has_type: bool | None = None,
    ) -> None:
        with self._translated(self._file):
            self.tables.append(name, rows, compression, attributes, has_type=has_type)

    @property
    def is_heavy(self) -> bool:
        """Whether so much waits in memory that it should be flushed."""
        return self._file.waiting_bytes > _MOST_WAITING_BYTES

    @property
    def is_broken(self) -> bool:
        """Whether nothing more will be written: what was flushed is what there is."""
        return self._file.error is not None

    def write(
        self,
        name: str,
        array: Any,
        compression: str | int | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        with self._translated(self._file):
            self.tables.write(name, array, compression, attributes)

    def flush(self, note: bytes = b"") -> None:
        """What was appended by now survives a crash from now on, with a note for who goes on."""
        with self._translated(self._file):
            self.tables.flush()
            self._file.commit(note)

    def publish(self) -> None:
        """The file is whole: give it its name."""
        refuse_unsafe_target(self.target)
        with self._translated(self._file):
            self.tables.flush()
            # Everything is in the file by now: what an error in closing leaves can be recovered.
            self._file.commit()
            self.h5.close()
            self._file.publish(self.target)
        try:
            _remove(interrupted_of(self.target))
        except OSError as error:
            _log.warning("%s is not needed any more: %s", interrupted_of(self.target), error)

    def abandon(self) -> None:
        """Keep what can be kept, for `recover` or the next writer."""
        try:
            if self._file.error is None:
                self.flush()
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Let go of it: what the last `flush` has left is what stays."""
        self._file.stop_writing()
        try:
            self.h5.close()
        except (OSError, RuntimeError) as error:
            # HDF5 does not recover from an error in the middle of a flush. It cannot write either.
            _log.debug("%s: HDF5 does not let go of it: %s", self._work, error)
        self._file.close()

    @contextlib.contextmanager
    def _in_hdf5(self) -> Iterator[None]:
        """Around what changes rows: if it does not come to its end, nothing more is written.

        HDF5 may have half of it, and what comes later would be published with that.
        """
        try:
            yield
        except BaseException as error:
            found = _interruption(error)
            self._file.fail(found)
            if found is not error:
                raise found from error
            if type(error) in _OF_HDF5:
                cause = f"{type(error).__name__}: {error}"
                raise CheckpointWriteError(self.target, cause) from error
            raise

    def _opened(self, mode: str) -> h5py.File:
        try:
            return h5py.File(self._file, mode)
        except OSError as error:
            if self._file.error is not None:
                raise
            if journal_of(self._work).exists():
                raise CorruptCheckpointError(self._work, f"{error}") from error
            _remove(self._work)  # The copy of a file that is none of ours.
            raise CorruptCheckpointError(
                self.target, f"expected an HDF5 file to go on with ({error})"
            ) from error

    def _made_ready(self, resume: bool) -> bool:
        """Whether there is something at the place of work to go on with."""
        left = recover(self._work)
        if resume:
            if left is not None:
                self.note = left
                return True
            source = self.target if self.target.exists() else None
            self._clear()
            if source is None:
                return False
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            # Not `copyfile`, which would open it to all first, and follow a link.
            with (
                open(source, "rb") as former,
                open(os.open(self._work, flags, closed_as(source)), "wb") as copy,
            ):
                shutil.copyfileobj(former, copy, _COPIED_BYTES)
            return True
        if left is not None:
            self._set_aside()
        self._clear()
        return False

    def _set_aside(self) -> None:
        """Of earlier lives the one with the most rows stays; of equal ones the later."""
        aside = interrupted_of(self.target)
        # A link was not set aside here, whatever it leads to.
        is_there = aside.exists() and not aside.is_symlink()
        if not is_there or _row_count(aside) <= _row_count(self._work):
            os.replace(self._work, aside)
            sync_directory(aside.parent)

    def _clear(self) -> None:
        # The file first: a journal without a file is nothing, a file with an old journal is wrong.
        _remove(self._work)
        _remove(journal_of(self._work))
        # Durable, since a power cut could else leave the next file with this journal; also if
        # there was none: whoever has published the last one may have removed it just now.
        sync_directory(self._work.parent)

    @contextlib.contextmanager
    def _translated(self, file: JournaledFile | None) -> Iterator[None]:
        """What was kept from HDF5, or what it has wrapped into what it was doing."""
        if file is not None and file.error is not None:
            raise self._earlier(file.error) from file.error
        try:
            yield
            if file is not None:
                file.raise_error()
        except BaseException as error:
            if file is not None and not isinstance(error, Exception):
                # Ctrl-C in the middle of HDF5: half of what was to be done, as if it were all.
                file.fail(error)
                raise
            if file is not None and not isinstance(file.error, Exception | None):
                raise file.error from error  # A Ctrl-C that was kept from HDF5.
            cause = _said_by_disk(error if file is None else file.error)
            if cause is not None:
                published = file is not None and file.is_published
                raise CheckpointWriteError(self.target, cause, published=published) from error
            raise

    def _earlier(self, error: BaseException) -> CheckpointWriteError:
        cause = _said_by_disk(error) or f"an earlier write did not come to its end ({error!r})"
        return CheckpointWriteError(self.target, cause)


def _said_by_disk(error: BaseException | None) -> OSError | None:
    if isinstance(error, CheckpointWriteError):  # Of the journal.
        error = error.__cause__
    # What h5py says, or a signal handler of the user's, has no number.
    return error if isinstance(error, OSError) and error.errno is not None else None


def _interruption(error: BaseException) -> BaseException:
    """The Ctrl-C that HDF5 has made a `SystemError` of, or the error itself."""
    cause: BaseException | None = error
    while cause is not None:
        if not isinstance(cause, Exception):
            return cause
        cause = cause.__cause__
    return error


_open_files: weakref.WeakSet[GrowingFile] = weakref.WeakSet()


@atexit.register
def _let_go_of_all() -> None:
    """HDF5 closes what is open when the interpreter is gone, and would call it for that."""
    for file in list(_open_files):
        file.give_up()


def clear_journal(target: Path) -> None:
    """Under the lock: what a writer has left that was killed right after it has published."""
    _remove(journal_of(unfinished_of(target)))


def _row_count(path: Path) -> int:
    """In all datasets together. Not by its bytes: one may be compressed."""
    try:
        return sum(rows_in(path).values())
    except CorruptCheckpointError as error:
        cause: BaseException | None = error
        while cause is not None:
            # It may be whole, and have the most: nothing takes its place meanwhile.
            if isinstance(cause, OSError) and cause.errno in NOT_ITS_FAULT:
                raise UnreadableCheckpointError(path, cause) from error
            cause = cause.__cause__
        return -1


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
