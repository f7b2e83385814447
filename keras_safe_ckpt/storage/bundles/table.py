"""Reads sorted tables of LevelDB, without TensorFlow and without trust.

::

    block ... block  index block  footer
    block:  entries, restart points, kind of compression (1 byte), checksum (4 bytes)
    entry:  length shared with the key before, rest of the key, length of the value, both
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from keras_safe_ckpt.storage.checksum import extended, masked

_FOOTER_BYTES = 48
_MAGIC = 0xDB4775248B80FB57
_TRAILER_BYTES = 5
#: A key is written without what it has in common with the one before: names of a network are some
#: times longer than what is stored of them, and not a thousand times.
_MOST_KEY_BYTES_PER_BYTE = 100
_SPARE_KEY_BYTES = 1 << 20


class TableError(ValueError):
    """It is not a table, or is damaged; the text says how."""


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """All keys with their values, in order; `TableError` at the first thing that is wrong."""
    if len(data) < _FOOTER_BYTES:
        raise TableError("it is too short")
    footer = data[-_FOOTER_BYTES:]
    if struct.unpack("<Q", footer[-8:])[0] != _MAGIC:
        raise TableError("it does not end as an index does")
    _, position = _handle(footer, 0)
    blocks, _ = _handle(footer, position)
    left = _MOST_KEY_BYTES_PER_BYTE * len(data) + _SPARE_KEY_BYTES
    behind = 0
    for _, value in _entries(_block(data, *blocks)):
        (offset, size), _ = _handle(value, 0)
        if offset < behind:
            # Any number of them could lead to the same block, which has any number of entries.
            raise TableError("its blocks are not one after another")
        behind = offset + size
        for key, content in _entries(_block(data, offset, size)):
            left -= len(key)
            if left < 0:
                raise TableError("its keys are much longer than it is")
            yield key, content


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A number in the coding of protocol buffers, and the position after it."""
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise TableError("a number in it does not end")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _handle(data: bytes, position: int) -> tuple[tuple[int, int], int]:
    offset, position = read_varint(data, position)
    size, position = read_varint(data, position)
    return (offset, size), position


def _block(data: bytes, offset: int, size: int) -> bytes:
    end = offset + size + _TRAILER_BYTES
    if end > len(data) - _FOOTER_BYTES:
        raise TableError("a block lies outside of it")
    stored = struct.unpack("<I", data[end - 4 : end])[0]
    if masked(extended(0, data[offset : end - 4])) != stored:
        raise TableError("the checksum of a block is wrong")
    if data[end - _TRAILER_BYTES]:
        raise TableError("it is compressed, which TensorFlow's are not")
    return data[offset : offset + size]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 4:
        raise TableError("a block is too short")
    end = len(block) - 4 * (struct.unpack("<I", block[-4:])[0] + 1)
    if end < 0:
        raise TableError("a block has more restart points than bytes")
    key, position = b"", 0
    while position < end:
        shared, position = read_varint(block, position)
        rest, position = read_varint(block, position)
        length, position = read_varint(block, position)
        if shared > len(key) or position + rest + length > end:
            raise TableError("an entry lies outside of its block")
        key = key[:shared] + block[position : position + rest]
        position += rest
        yield key, block[position : position + length]
        position += length
