"""Files of our own making, and parts of files, as libraries want to read them."""

from __future__ import annotations

import io
import os
from typing import Any

#: What a parser reads of its own accord is small: data is read with `FileWindow.read_at`.
_MOST_AT_ONCE = 8 << 20


class SeekableFile(io.RawIOBase):
    """A position within ``size`` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position


class FileWindow(SeekableFile):
    """``size`` bytes from ``start`` of an open file, as a file of its own.

    Read with pread: no shared position, and the same descriptor, so that a file which is
    replaced or removed meanwhile is still the one that was opened.
    """

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        super().__init__(size)
        self._descriptor = descriptor
        self._start = start
        #: What the system said last; a parser may take it for the end of the file.
        self.error: OSError | None = None

    def read(self, size: int | None = -1) -> bytes:
        """As any file does; a parser that a hostile file sends for more is refused."""
        if size is not None and size > _MOST_AT_ONCE:
            raise ValueError(f"it wants {size:,} bytes at once")
        return super().read(-1 if size is None else size) or b""

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self.size - self._position)]
        done = self.read_at(self._position, view)
        self._position += done
        return done

    def read_at(self, offset: int, view: memoryview) -> int:
        """Fill ``view`` from ``offset``; fewer bytes only where the file ends."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], self._start + offset + done)
            except OSError as error:
                self.error = error
                raise
            if count == 0:
                break
            done += count
        return done
