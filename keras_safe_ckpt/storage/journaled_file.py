"""A file that can be changed anywhere, and after a crash is what it was at its last commit.

A library that writes a format of its own (HDF5) changes what it wrote before: a crash in between
leaves a file that nobody can open. Here such changes wait in memory, as pages, until `commit`:

1. What was added behind the committed end is written at once, and synced.
2. The changed pages go to the journal beside the file, synced, under its name by a rename.
   From now on this is what `recover` brings back.
3. The pages are written to the file.

The journal stays until the next commit, or the end. To apply it again changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import xxhash

from keras_safe_ckpt.errors import CorruptCheckpointError
from keras_safe_ckpt.storage.atomic import write_atomically
from keras_safe_ckpt.storage.block_writer import write_all
from keras_safe_ckpt.storage.early_sync import EarlySync
from keras_safe_ckpt.storage.paths import let_go, sync_directory

_log = logging.getLogger(__name__)

_PAGE = 4096
_MAGIC = b"kscj0001"
#: Magic, three sizes (of the file, of the note, of all pages), digest of these and of what follows.
_HEADER_BYTES = 8 + 3 * 8 + 8
_PAGE_ENTRY = 8 + _PAGE


def journal_of(path: Path) -> Path:
    """Where the journal of a file is."""
    return path.with_name(f"{path.name}.journal")


class JournaledFile:
    """Has the methods of a Python file that h5py wants, and `commit`.

    The first error in writing, Ctrl-C included, is kept in ``error`` rather than raised: HDF5 does
    not survive a write that fails (of texts it crashes). Nothing is written after that, so that
    whoever writes can come to an end and let go of the file. The same in a forked child, which has
    the file of its parent. `commit` raises the error; look for it before that.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Open a file that was recovered, or make a new one of this mode, less the umask."""
        self.path = path
        self.error: BaseException | None = None
        self._pid = os.getpid()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        #: Whether it has the name that it was written for.
        self.is_published = False
        self._descriptor = os.open(path, flags, mode)
        try:
            self._size = self._committed = os.fstat(self._descriptor).st_size
        except BaseException:
            let_go(self._descriptor)
            raise
        self._pages: dict[int, bytearray] = {}
        self._position = 0
        self._early_sync = EarlySync(self._descriptor)

    @property
    def waiting_bytes(self) -> int:
        """How much memory the changes take that wait for the next commit."""
        return len(self._pages) * _PAGE

    # What h5py calls.

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        data = bytearray(size)
        return bytes(data[: self.readinto(memoryview(data))])

    def readinto(self, buffer: memoryview) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        self._read_file(view, self._position)
        if self._pages:
            for page, part, start, stop in _pieces(self._position, len(view)):
                if page in self._pages:
                    view[part : part + stop - start] = self._pages[page][start:stop]
        self._position += len(view)
        return len(view)

    def write(self, data: memoryview) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        if self.error is None and self._pid == os.getpid():
            try:
                inside = max(0, min(size, self._committed - self._position))
                if inside:
                    self._change(view[:inside])
                if inside < size:
                    self._append(view[inside:], self._position + inside)
            except BaseException as error:  # noqa: BLE001  # kept
                self.fail(error)
        self._position += size
        self._size = max(self._size, self._position)
        return size

    def truncate(self, size: int | None = None) -> int:
        # Only as far as this file is concerned: what was committed stays until the next commit.
        self._size = self._position if size is None else size
        return self._size

    def flush(self) -> None:
        """Nothing: what is written is durable after `commit`."""

    # The rest.

    def commit(self, note: bytes = b"") -> None:
        """From now on a crash leaves what is written by now; `OSError` if that cannot be.

        ``note`` is kept with it, and is what `recover` returns.
        """
        self.raise_error()
        try:
            self._set_size()
            self._early_sync.finish()
            os.fsync(self._descriptor)
            # It holds parts of the file.
            journal = self._journal(note)
            write_atomically(journal_of(self.path), journal, closed_like=[self.path])
            for number, content in self._pages.items():
                write_all(self._descriptor, content, number * _PAGE)
            # A last page that is not whole was written to its end.
            os.ftruncate(self._descriptor, self._size)
        except BaseException as error:
            self.error = error
            raise
        self._pages.clear()
        self._committed = self._size

    def publish(self, target: Path) -> None:
        """Let the committed file be ``target``, durable."""
        self.commit()
        try:
            os.fsync(self._descriptor)
            os.replace(self.path, target)
            self.is_published = True
            sync_directory(target.parent)
        except BaseException as error:
            self.fail(error)
            raise
        self.close()
        try:
            journal_of(self.path).unlink()
        except OSError as error:  # Without its file it is nothing, and the next one removes it.
            _log.debug("Left %s behind: %s", journal_of(self.path), error)

    def stop_writing(self) -> None:
        """From now on nothing changes: as it was committed, it stays."""
        self.fail(ValueError("closed"))

    def fail(self, error: BaseException) -> None:
        """As after an error in here: nothing is written any more."""
        if self.error is None:
            self.error = error

    def raise_error(self) -> None:
        """If there is one by now."""
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Without a commit: raise what has gone wrong by now, here or on the disk."""
        self.raise_error()
        self._early_sync.finish()

    def close(self) -> None:
        """Let go of the file; it is as it was committed when it is recovered."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            if self._pid == os.getpid():  # A forked child has no thread to wait for.
                with contextlib.suppress(OSError):  # Of what nobody will commit any more.
                    self._early_sync.finish()
            let_go(descriptor)  # What was committed is synced.

    def _journal(self, note: bytes) -> bytes:
        pages = b"".join(
            number.to_bytes(8, "little") + content for number, content in self._pages.items()
        )
        sizes = b"".join(size.to_bytes(8, "little") for size in (self._size, len(note), len(pages)))
        return _MAGIC + sizes + xxhash.xxh3_64_digest(sizes + note + pages) + note + pages

    def _set_size(self) -> None:
        """What HDF5 reserved and never wrote belongs to the file, too."""
        if os.fstat(self._descriptor).st_size < self._size:
            os.ftruncate(self._descriptor, self._size)

    def _change(self, view: memoryview) -> None:
        # HDF5 writes whole chunks, of which most is often as before: that needs no journal.
        former = memoryview(bytearray(len(view)))
        self._read_file(former, self._position)
        for page, part, start, stop in _pieces(self._position, len(view)):
            content = self._pages.get(page)
            if content is None:
                size = stop - start
                if view[part : part + size] == former[part : part + size]:
                    continue
                content = self._pages[page] = bytearray(_PAGE)
                if stop - start < _PAGE:
                    self._read_file(memoryview(content), page * _PAGE)
            content[start:stop] = view[part : part + stop - start]

    def _append(self, view: memoryview, offset: int) -> None:
        last = offset // _PAGE
        if last in self._pages:
            # The page in which the committed part ends: its rest is in memory as well.
            start = offset - last * _PAGE
            part = view[: _PAGE - start]
            self._pages[last][start : start + len(part)] = part
        write_all(self._descriptor, view, offset)
        self._early_sync.add(len(view))

    def _read_file(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if not count:
                view[done:] = bytes(len(view) - done)  # Reserved, and never written.
                return
            done += count


def recover(path: Path) -> bytes | None:
    """Make a file whose writer is gone what it was at its last commit, and return the note of that.

    None if there was no commit: then there is nothing to be had. `CorruptCheckpointError` if it
    cannot be told any more what was committed; then nothing is changed.
    """
    # A link was not made by a writer: it is nothing, whatever it leads to.
    found = _read_journal(path) if path.exists() and not path.is_symlink() else None
    if found is None:
        return None
    size, note, pages = found
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for start in range(0, len(pages), _PAGE_ENTRY):
            number = int.from_bytes(pages[start : start + 8], "little")
            content = pages[start + 8 : start + _PAGE_ENTRY]
            write_all(descriptor, content, number * _PAGE)
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        let_go(descriptor)
    return note


def _read_journal(path: Path) -> tuple[int, bytes, memoryview] | None:
    """Size, note and pages; None if there is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(journal_of(path), flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _damaged(path, "it is not a regular file") from None
        raise
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _damaged(path, "it is not a regular file")
        head = file.read(_HEADER_BYTES)
        if not head.startswith(_MAGIC):
            raise _damaged(path, "it does not begin like a journal of this version")
        sizes, digest = head[8:32], head[32:40]
        size, note, pages = (int.from_bytes(sizes[at : at + 8], "little") for at in (0, 8, 16))
        length = os.fstat(descriptor).st_size
        if length != _HEADER_BYTES + note + pages or pages % _PAGE_ENTRY:
            raise _damaged(path, "its size is wrong")
        # All that was committed is there: who takes the journal for more than that has made it.
        if size > os.stat(path).st_size or pages // _PAGE_ENTRY > -(-size // _PAGE):
            raise _damaged(path, f"it is of a file of {size:,} bytes")
        body = file.read()
    if xxhash.xxh3_64_digest(sizes + body) != digest:
        raise _damaged(path, "its checksum does not hold")
    entries = memoryview(body)[note:]
    for start in range(0, pages, _PAGE_ENTRY):
        if int.from_bytes(entries[start : start + 8], "little") * _PAGE >= size:
            raise _damaged(path, "it has a page behind the end of the file")
    return size, body[:note], entries


def _damaged(path: Path, reason: str) -> CorruptCheckpointError:
    # What was committed may be there but for a page. To begin anew would delete it.
    return CorruptCheckpointError(
        journal_of(path),
        f"{reason}; without it {path.name} cannot be put right. Move both away to begin anew",
    )


def _pieces(offset: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """The pages of a range: number, where it begins in the range, from and to in the page."""
    done = 0
    while done < size:
        page, start = divmod(offset + done, _PAGE)
        stop = min(_PAGE, start + size - done)
        yield page, done, start, stop
        done += stop - start
