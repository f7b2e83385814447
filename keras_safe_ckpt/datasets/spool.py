"""Rows on their way from a feeder to the process that owns the file: frames in spool files.

What was written to a file is there when the process that wrote it is killed. So a feeder appends
frames to spool files of its own, and the owner of the HDF5 file reads them from there, at its own
pace. A frame that is not whole was not appended: its feeder was killed in the middle.

A stream is what one feeder writes: the segments ``STREAM.0``, ``STREAM.1``, ... one after another.
Each but the first begins with how much of the stream comes before it: a power cut may have taken
some of that, and rows behind a gap must not look as if they came next.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import xxhash

from keras_safe_ckpt.datasets.frames import (
    HEADER,
    MAGIC,
    MOST_DESCRIPTION_BYTES,
    Message,
    decoded,
    encoded,
)
from keras_safe_ckpt.errors import CorruptCheckpointError

_log = logging.getLogger(__name__)

#: When a segment is larger than this, the next one begins.
SEGMENT_BYTES = 16 << 20
#: The beginning of a segment: a mark, and how many bytes of its stream come before it.
_LINK = struct.Struct("<8sQ")
_LINK_MARK = b"ksck-seg"


class SpoolWriter:
    """The feeder's end of a stream, in one folder: not in another one that takes its name.

    How much there is, is asked of the files: a Ctrl-C cannot come between them and a count.
    """

    def __init__(self, folder: Path, stream: str) -> None:
        self._path = folder
        self._stream = stream
        #: The number of the segment, and the bytes in those before it.
        self._place = (0, 0)
        self._descriptor = -1
        self._is_begun = False
        self._folder = _open_folder(folder)

    @property
    def size(self) -> int:
        """How many bytes of frames were written in all."""
        return self._place[1] + os.fstat(self._opened()).st_size

    def write(self, message: Message) -> None:
        """When it returns the frame is there, whatever happens to this process."""
        parts = encoded(message)
        start = os.fstat(self._opened()).st_size
        if start >= SEGMENT_BYTES:
            self._begin_next_segment(start)
            start = 0
        segment, before = self._place
        if segment and not start:
            parts.insert(0, _LINK.pack(_LINK_MARK, before))
        try:
            _write_all(self._descriptor, parts)
        except BaseException:
            # Half a frame is taken back. A whole one may have been read already.
            size = sum(len(part) for part in parts)
            if start < os.fstat(self._descriptor).st_size < start + size:
                os.ftruncate(self._descriptor, start)
            raise

    def is_there(self) -> bool:
        """Whether what was written can still be found, or nothing was."""
        try:
            return _exists(segment_name(self._stream, self._place[0]), self._reached())
        except FileNotFoundError:
            return False

    def rest(self) -> None:
        """Let go of the files; it goes on with them when there is more to write."""
        for descriptor in (self._descriptor, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._folder = -1

    def _reached(self) -> int:
        """The folder; the same one as long as this stream is in it."""
        if self._folder < 0:
            self._folder = _open_folder(self._path)
        return self._folder

    def _opened(self) -> int:
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            if self._place == (0, 0) and not self._is_begun:
                flags |= os.O_CREAT
            name = segment_name(self._stream, self._place[0])
            self._descriptor = os.open(name, flags, 0o600, dir_fd=self._reached())
            self._is_begun = True
        return self._descriptor

    def _begin_next_segment(self, size: int) -> None:
        segment, before = self._place
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        name = segment_name(self._stream, segment + 1)
        descriptor = os.open(name, flags, 0o600, dir_fd=self._reached())
        former, self._descriptor = self._descriptor, -1
        self._place = (segment + 1, before + size)
        self._descriptor = descriptor
        os.close(former)


class SpoolReader:
    """The owner's end of a stream, from a place where it was before.

    The rows of a message are to be used before the next one is read, of whatever stream: there is
    room for one.
    """

    _buffer = bytearray()

    def __init__(self, folder: Path, stream: str, segment: int = 0, offset: int = 0, size: int = 0):
        self._folder = folder
        self.stream = stream
        self.segment = segment
        self.offset = offset
        #: How many bytes of frames were read in all.
        self.size = size
        self._descriptor = -1
        self._oldest: int | None = None
        #: A power cut has taken what comes next: nothing behind it is read.
        self._is_cut = False

    @property
    def position(self) -> tuple[int, int, int]:
        """Where one like this goes on."""
        return self.segment, self.offset, self.size

    def read(self) -> Message | None:
        """The next frame; None if there is none yet that is whole."""
        while True:
            message = self._read_frame()
            if message is not None or self._is_cut or not self._has_next_segment():
                return message
            # Looked at again: it may have grown between the two looks.
            message = self._read_frame()
            if message is not None:
                return message
            self._close()
            self.segment += 1
            self.offset = 0

    def has_more(self) -> bool:
        """Whether there is something behind; if it cannot be read, it is half a frame."""
        if self._is_cut:
            return False
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path(self.segment)).st_size > self.offset:
                return True
        return self._has_next_segment()

    def release(self, first_needed: int) -> None:
        """Remove the segments before this one, the oldest first: none stays behind a gap."""
        if self._oldest is None:
            self._oldest = min(segments_of(self._folder, self.stream), default=first_needed)
        while self._oldest < first_needed:
            with contextlib.suppress(FileNotFoundError):
                self._path(self._oldest).unlink()
            self._oldest += 1

    def close(self) -> None:
        """Let go of the file; it is opened again when there is something to read."""
        self._close()

    def _path(self, segment: int) -> Path:
        return self._folder / segment_name(self.stream, segment)

    def _opened(self) -> bool:
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(
                    self._path(self.segment), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                )
            except FileNotFoundError:
                return False
        return True

    def _has_next_segment(self) -> bool:
        return self._path(self.segment + 1).exists()

    def _is_linked(self) -> bool:
        """At the beginning of a segment: whether it goes on where the one before has ended."""
        link = os.pread(self._descriptor, _LINK.size, 0)
        if len(link) < _LINK.size:
            return False  # It is about to be written.
        if link != _LINK.pack(_LINK_MARK, self.size):
            self._is_cut = True
            _log.warning(
                "%s: rows that were not flushed are lost, by a power cut, and those after them are "
                "left out",
                segment_name(self.stream, self.segment),
            )
            return False
        self.offset = _LINK.size
        self.size += _LINK.size
        return True

    def _read_frame(self) -> Message | None:
        if self._is_cut or not self._opened():
            return None
        if self.segment and not self.offset and not self._is_linked():
            return None
        head = os.pread(self._descriptor, HEADER.size, self.offset)
        if len(head) < HEADER.size:
            return None
        magic, description_size, data_size, digest = HEADER.unpack(head)
        if magic != MAGIC or description_size > MOST_DESCRIPTION_BYTES:
            return None
        size = description_size + data_size
        end = self.offset + HEADER.size + size
        if os.fstat(self._descriptor).st_size < end:
            return None
        if len(SpoolReader._buffer) < size:
            SpoolReader._buffer = bytearray(size)
        view = memoryview(SpoolReader._buffer)[:size]
        if not _read_all(self._descriptor, view, self.offset + HEADER.size):
            return None
        if xxhash.xxh3_64_intdigest(view) != digest:
            return None
        try:
            message = decoded(bytes(view[:description_size]), view[description_size:])
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            # Whole, and none that a feeder writes: nobody can tell what is behind it.
            raise CorruptCheckpointError(
                self._path(self.segment), f"a frame of it cannot be understood ({error!r:.200})"
            ) from error
        self.offset = end
        self.size += HEADER.size + size
        return message

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def segment_name(stream: str, number: int) -> str:
    return f"{stream}.{number}"


def segments_of(folder: Path, stream: str) -> list[int]:
    """The numbers of the segments that are there."""
    found = [name.rpartition(".") for name in os.listdir(folder)]
    return [int(number) for name, _, number in found if name == stream and number.isdigit()]


def streams_in(folder: Path) -> set[str]:
    """The names of the streams of which there is a segment."""
    with contextlib.suppress(FileNotFoundError):
        return {
            name.rpartition(".")[0]
            for name in os.listdir(folder)
            if name.rpartition(".")[2].isdigit()
        }
    return set()


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    rest = [memoryview(part) for part in parts if len(part)]
    while rest:
        count = os.writev(descriptor, rest[:16])
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]


def _read_all(descriptor: int, view: memoryview, offset: int) -> bool:
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            return False
        view, offset = view[count:], offset + count
    return True
