"""The bytes of one tensor in a data file: do they have the checksum that the index says?

Strings are preceded by all their lengths and a checksum of these; each variant (an object, such
as the state of an iterator) by its length, with a checksum of all that came before after it.
"""

from __future__ import annotations

import os

from keras_safe_ckpt.storage.bundles.index import Entry
from keras_safe_ckpt.storage.bundles.table import TableError, read_varint
from keras_safe_ckpt.storage.checksum import extended, masked

#: TensorFlow's numbers of the two.
_STRING, _VARIANT = 7, 21
_LONGEST_VARINT = 10
#: Stays in the cache of the processor between reading and counting.
_CHUNK_BYTES = 256 << 10


def are_whole(descriptor: int, entry: Entry) -> bool:
    """Whether the bytes of ``entry`` in an open data file are what they were."""
    reader = _Reader(descriptor, entry.offset, entry.size)
    try:
        if entry.dtype == _STRING:
            _read_strings(reader, entry.count)
        elif entry.dtype == _VARIANT:
            for _ in range(entry.count):
                _read_variant(reader)
        else:
            reader.count(entry.size)
    except TableError:
        return False
    return reader.position == reader.end and masked(reader.checksum) == entry.checksum


def _read_strings(reader: _Reader, count: int) -> None:
    total = 0
    for _ in range(count):
        length = reader.length()
        reader.add(length.to_bytes(4 if length < 1 << 32 else 8, "little"))
        total += length
    reader.compare()
    reader.count(total)


def _read_variant(reader: _Reader) -> None:
    length = reader.length()
    reader.add(length.to_bytes(8, "little"))
    reader.count(length)
    reader.compare()


class _Reader:
    """Goes through the bytes of a tensor once, with the checksum of what it came by."""

    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        self._descriptor = descriptor
        self.position = offset
        self.end = offset + size
        self.checksum = 0

    def add(self, data: bytes) -> None:
        """Count something that stands in another form in the file."""
        self.checksum = extended(self.checksum, data)

    def count(self, size: int) -> None:
        """Read so many bytes, which count as they are."""
        stop = self.position + size
        if stop > self.end:
            raise TableError("it says that it is longer than it is")
        while self.position < stop:
            wanted = min(stop - self.position, _CHUNK_BYTES)
            data = os.pread(self._descriptor, wanted, self.position)
            if not data:
                raise TableError("it ends early")
            self.add(data)
            self.position += len(data)

    def length(self) -> int:
        left = self.end - self.position
        head = os.pread(self._descriptor, min(_LONGEST_VARINT, left), self.position)
        value, used = read_varint(head, 0)
        self.position += used
        return value

    def compare(self) -> None:
        """Read the checksum of all that came before, which counts, too."""
        stored = os.pread(self._descriptor, min(4, self.end - self.position), self.position)
        if stored != masked(self.checksum).to_bytes(4, "little"):
            raise TableError("a checksum in it is wrong")
        self.add(stored)
        self.position += 4
