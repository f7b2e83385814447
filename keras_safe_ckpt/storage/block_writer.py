"""Write a new file in large blocks, past the page cache where the file system can.

A checkpoint is written once and read rarely. Through the page cache it takes memory as large as
the model, which on a virtual machine the host may have to provide first, and pushes out what
training reads. Large aligned blocks go straight to the device instead (``O_DIRECT``); what is
smaller, and all of it where that is refused, goes the usual way.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

from keras_safe_ckpt.storage.overlap import OverlappedWriter
from keras_safe_ckpt.storage.paths import let_go

#: Large enough that the device, not the calls, sets the pace; there are two of them.
BLOCK_BYTES = 8 << 20

#: Memory, offset and size of a direct write are multiples of this on all devices of today.
_ALIGNMENT = 4096

#: What a file system says that opens a file with O_DIRECT and then does not write it so.
_NOT_SO = (errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES)


class BlockWriter:
    """Appends to the empty file ``path``, open for writing as ``descriptor``.

    One block is filled while the one before is written on a thread of its own, which begins with
    the first full block. What fails there is raised by a later call, at the latest by `flush`::

        writer = BlockWriter(path, descriptor)
        writer.append(memoryview(b"..."))
        writer.flush()
        os.fsync(descriptor)
        writer.close()
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._overlapped: OverlappedWriter | None = None
        self._block = self._spare = memoryview(b"")
        self._start = 0
        self._filled = 0

    @property
    def size(self) -> int:
        """Of the file, when everything is written."""
        return self._start + self._filled

    def append(self, data: memoryview) -> None:
        taken = 0
        while taken < len(data):
            if not self._block:
                self._block = _aligned_memory()
            piece = data[taken : taken + BLOCK_BYTES - self._filled]
            self._block[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            taken += len(piece)
            if self._filled == BLOCK_BYTES:
                self._hand_over()

    def write_at(self, offset: int, data: memoryview) -> None:
        """Overwrite a part that was appended before."""
        before = data[: max(0, self._start - offset)]
        within = data[len(before) :]
        if before:
            self._drain()  # Not while a block that it belongs to is on its way.
            write_all(self._descriptor, before, offset)
        if within:
            place = offset + len(before) - self._start
            self._block[place : place + len(within)] = within

    def flush(self) -> None:
        """Everything is with the system: `os.fsync` makes it durable."""
        self._drain()
        self.close()  # Now, since the caller may take a lock next: it should not wait for this.
        write_all(self._descriptor, self._block[: self._filled], self._start)

    def close(self) -> None:
        """End the thread; what was not flushed is dropped."""
        overlapped, self._overlapped = self._overlapped, None
        if overlapped is not None:
            overlapped.close()

    def _hand_over(self) -> None:
        if self._overlapped is None:
            self._overlapped = OverlappedWriter(_BlockFile(self._path, self._descriptor))
        self._overlapped.write(self._start, self._block)
        # The block before this one is written now, and free to be filled.
        self._block, self._spare = self._spare, self._block
        self._start, self._filled = self._start + BLOCK_BYTES, 0

    def _drain(self) -> None:
        if self._overlapped is not None:
            self._overlapped.drain()


class _BlockFile:
    """The file, for a thread that owns its descriptors.

    Those of the caller may be closed, and their numbers belong to another file, while the thread
    is still writing: a Ctrl-C can end any wait for it.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._cached = os.dup(descriptor)
        self._direct = _open_direct(path, descriptor)

    def write(self, offset: int, block: memoryview) -> None:
        done = self._write_directly(offset, block)
        write_all(self._cached, block[done:], offset + done)

    def close(self) -> None:
        # What failed is said by the fsync of the caller's descriptor, which is older.
        let_go(self._cached)
        if self._direct is not None:
            let_go(self._direct)

    def _write_directly(self, offset: int, block: memoryview) -> int:
        """How much of ``block`` was written past the cache; the rest goes through it."""
        done = 0
        # A device that took a part may leave a rest that is not aligned.
        while self._direct is not None and done < len(block) and done % _ALIGNMENT == 0:
            try:
                done += os.pwrite(self._direct, block[done:], offset + done)
            except OSError as error:
                if error.errno not in _NOT_SO:
                    raise
                let_go(self._direct)
                self._direct = None
        return done


def _aligned_memory() -> memoryview:
    """A block that begins with a page; it costs what is written to it."""
    # Private: shared memory, which is the default, is accounted for and limited otherwise.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, BLOCK_BYTES, flags=flags))


def write_all(descriptor: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Also where the system takes it piece by piece."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _open_direct(path: Path, descriptor: int) -> int | None:
    """The same file for direct writes; None where there are none."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    # Without waiting for a reader, should a pipe have its name.
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | flag
    try:
        direct = os.open(path, flags)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(direct), os.fstat(descriptor)):
            return direct
    let_go(direct)  # Something else has its name, or nobody can tell.
    return None
