"""Publish a file whole or not at all, whatever interrupts.

The stages of a `StagedFile`, in this order::

    open      a unique temporary file beside the target, so that the rename cannot cross devices;
              closed to whom the umask, or the mode of what it replaces, closes it
    write     by the caller, front to back
    sync      fsync: the bytes are on the disk before the name points to them
    commit    os.replace, then fsync of the directory: the name is on the disk as well
    rollback  instead of commit: the temporary file is removed, the target is untouched
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from keras_safe_ckpt.errors import CheckpointWriteError
from keras_safe_ckpt.storage.block_writer import BlockWriter
from keras_safe_ckpt.storage.locks import claim, relax
from keras_safe_ckpt.storage.paths import (
    absolute,
    closed_as,
    let_go,
    make_directory,
    refuse_unsafe_target,
    sync_directory,
)
from keras_safe_ckpt.storage.temp_names import new_temp_name, owner_of

_log = logging.getLogger(__name__)

#: A temporary file of another machine is taken for abandoned when its lock is free and nothing
#: was written to it for this long. Should its owner wake up after all, its rename fails cleanly.
FOREIGN_ORPHAN_SECONDS = 3600.0
#: A temporary folder with a file of this name has what is to be put right, and is not swept: it
#: may be the only copy.
JOURNAL_NAME = "journal.json"


class StagedFile:
    """A file on its way to ``target``; use it as a context manager.

    ``closed_like`` are files whose content goes into it: it is open to nobody to whom they, or what
    it replaces, are closed.

    Leaving the block without `commit`, for whatever reason, is a rollback::

        with StagedFile("model.weights.h5") as staged:
            staged.write(data)
            staged.sync()
            staged.commit()
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        step: int | None = None,
        closed_like: Sequence[Path] = (),
    ) -> None:
        self.target = absolute(target)
        self.step = step
        refuse_unsafe_target(self.target)
        make_directory(self.target.parent)
        self._synced = False
        with self._translated():
            self.temp_path, self._descriptor = _open_unique(
                self.target, closed_as(self.target, *closed_like)
            )
        self._blocks = BlockWriter(self.temp_path, self._descriptor)

    def __enter__(self) -> StagedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.rollback()

    @property
    def size(self) -> int:
        """How many bytes were written."""
        return self._blocks.size

    def write(self, data: bytes | memoryview) -> None:
        """Append all of ``data``; what fails may be raised by a later call, at last by `sync`."""
        self._synced = False
        with self._translated():
            self._blocks.append(memoryview(data).cast("B"))

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Overwrite a part that was written before."""
        self._synced = False
        with self._translated():
            self._blocks.write_at(offset, memoryview(data).cast("B"))

    def sync(self) -> None:
        # A failed fsync is final: the kernel may have dropped the pages and report success
        # the next time. The only way on is a new file.
        with self._translated():
            self._blocks.flush()
            _sync_to_device(self._descriptor)
        self._synced = True

    def commit(self) -> None:
        """Let the target be this file; durable when it returns."""
        self.replace_target()
        with self._translated(published=True):
            sync_directory(self.target.parent)

    def replace_target(self) -> None:
        """The rename alone, for a group that syncs its directory itself."""
        if not self._synced:
            raise RuntimeError(f"sync() must succeed before {self.target} is published.")
        refuse_unsafe_target(self.target)  # Again: something may have been planted meanwhile.
        with self._translated():
            if not _is_still(self.temp_path, self._descriptor):
                raise FileNotFoundError(errno.ENOENT, "something else has its temporary name")
            # The lock that marks the temporary file as alive must not meet a reader of the
            # published file (HDF5 locks what it reads), and must not go before the rename (a
            # sweeper in another container would take the file for abandoned).
            with contextlib.suppress(OSError):
                relax(self._descriptor)
            os.replace(self.temp_path, self.target)
            self._close()

    def rollback(self) -> None:
        """Remove the temporary file; after a commit there is none, and nothing happens.

        A disk that fails here as well must not hide the error that led here: what is left is
        swept by a later save.
        """
        self._close()
        try:
            os.unlink(self.temp_path)
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("Left %s behind: %s", self.temp_path, error)

    def _close(self) -> None:
        self._blocks.close()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            let_go(descriptor)  # Synced by now, or never to be published.

    @contextlib.contextmanager
    def _translated(self, *, published: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointWriteError(
                self.target, error, self.step, published=published
            ) from error


def commit_in_order(staged: Sequence[StagedFile]) -> None:
    """Publish several files of one directory; the last one is the commit.

    Whoever sees the last one sees all of them, also after a power cut.
    """
    *parts, last = staged
    for part in parts:
        part.replace_target()
    if parts:
        # One sync for all parts: their names must be durable before the last one's can be.
        try:
            sync_directory(last.target.parent)
        except OSError as error:
            raise CheckpointWriteError(last.target, error, last.step) from error
    last.commit()


def write_atomically(
    target: str | os.PathLike[str], data: bytes, *, closed_like: Sequence[Path] = ()
) -> None:
    """All of ``data``, durable, or the old content."""
    with StagedFile(target, closed_like=closed_like) as staged:
        staged.write(data)
        staged.sync()
        staged.commit()


def ensure_writable(directory: Path) -> None:
    """Find out now what a save in ``directory`` would find out later; nothing is left there."""
    try:
        StagedFile(directory / "probe").rollback()
    except CheckpointWriteError as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error.cause
        raise CheckpointWriteError(directory, cause) from error


@contextlib.contextmanager
def scratch_directory(parent: Path | None, name: str = "scratch") -> Iterator[Path]:
    """A temporary directory that is swept like a temporary file if its owner dies."""
    path = Path(parent or tempfile.gettempdir()) / new_temp_name(name)
    make_directory(path.parent)
    path.mkdir(mode=0o700)
    is_over = True
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # For a sweeper in another container, which does not see this process.
            _claim_if_possible(descriptor)
            yield path
        except GeneratorExit:
            # Nobody has left the block: the program ends, and what was abandoned is still needed.
            is_over = False
            raise
        finally:
            let_go(descriptor)
    finally:
        if is_over:
            remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a directory that nobody needs any more; what cannot be removed is left to a sweep.

    Tried twice: an error may be of the moment, and no sweep comes before this process has ended.
    """
    for _ in range(2):
        with contextlib.suppress(OSError):  # Some, of a look at what it has opened, it does raise.
            shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
    _log.info("Could not remove %s: it is left to a later save of another process.", path)


def sweep_orphans(directory: Path) -> list[str]:
    """Remove temporary files and directories whose owners are gone; return their names."""
    swept: list[str] = []
    try:
        orphans = list(find_orphans(directory))
    except OSError as error:
        _log_unswept(directory, error)
        return swept
    for path in orphans:
        try:
            if not path.is_dir():
                os.unlink(path)
            elif _has_journal(path):
                continue  # Removed by whoever puts it right (`bundles.recovery`).
            else:
                shutil.rmtree(path)
            swept.append(path.name)
        except OSError as error:
            _log_unswept(path, error)
    return swept


def find_orphans(
    directory: Path, is_settled: Callable[[Path], bool] = lambda path: False
) -> Iterator[Path]:
    """The temporary files and directories in ``directory`` whose owners are gone.

    Of another machine, or from before a restart of this one, only those that are old; or of which
    ``is_settled`` says that their owners would have claimed them by now.
    """
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries if owner_of(entry.name)]
    for name in names:
        path = directory / name
        try:
            orphan = _is_orphan(path, is_settled)
        except OSError as error:
            _log_unswept(path, error)
            continue
        if orphan:
            yield path


def _has_journal(folder: Path) -> bool:
    try:
        os.lstat(folder / JOURNAL_NAME)
    except FileNotFoundError:
        return False
    return True


def _log_unswept(path: Path, error: OSError) -> None:
    # Gone meanwhile, or not ours to remove: no reason for a save to fail.
    _log.debug("Did not sweep %s: %s", path, error)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Let what somebody has written to a file reach the disk; a failure is final."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _sync_to_device(descriptor)
    finally:
        let_go(descriptor)


def _open_unique(target: Path, mode: int) -> tuple[Path, int]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        path = target.parent / new_temp_name(target.name)
        descriptor = os.open(path, flags, mode)
        try:
            if _claim_if_possible(descriptor) and _is_still(path, descriptor):
                return path, descriptor
        except BaseException:
            _drop(path, descriptor)
            raise
        # A sweeper found it in the instant before it was claimed: take another name.
        _drop(path, descriptor)


def _drop(path: Path, descriptor: int) -> None:
    let_go(descriptor)
    try:
        os.unlink(path)
    except OSError as error:
        _log_unswept(path, error)


def _claim_if_possible(descriptor: int) -> bool:
    try:
        return claim(descriptor)
    except OSError:
        # No locks on this file system: the process id in the name has to do.
        return True


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _is_orphan(path: Path, is_settled: Callable[[Path], bool]) -> bool:
    owner = owner_of(path.name)
    if owner is None or owner.is_running():
        return False
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    # Writable, because over NFS only that can be locked exclusively.
    descriptor = os.open(path, flags | (os.O_RDONLY if path.is_dir() else os.O_RDWR))
    try:
        status = os.fstat(descriptor)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            return False
        old = time.time() - status.st_mtime > FOREIGN_ORPHAN_SECONDS
        # Not even touched before it is old: its owner may be about to claim it.
        due = owner.is_on_this_machine() or old or is_settled(path)
        return due and _claim_if_possible(descriptor)
    finally:
        let_go(descriptor)


def _sync_to_device(descriptor: int) -> None:
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:  # macOS: fsync alone stops at the drive's cache.
        fcntl.fcntl(descriptor, full_sync)
    else:
        os.fsync(descriptor)
