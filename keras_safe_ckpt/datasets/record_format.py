"""TFRecord: how records follow each other in a file, plain or compressed, without TensorFlow.

A record is its length (8 bytes), a checksum of the length (4), its bytes, and their checksum (4).
Compression is one stream around all of it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from keras_safe_ckpt.storage.checksum import checksum_of, extended, masked

COMPRESSION_TYPES = ("", "GZIP", "ZLIB")

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
#: Protocol buffers end there, and a length beyond it was not meant.
_MOST_RECORD_BYTES = (1 << 31) - 1
_BLOCK_BYTES = 1 << 20
#: The first block, and each is twice the one before: many begin to read and soon find damage.
_FIRST_BLOCK_BYTES = 1 << 12
#: How much tells whether, and how, a file is compressed.
_START_BYTES = 4096
#: What is larger is checked in pieces, if only that is asked for.
_LARGE_RECORD_BYTES = 64 << 20
#: How many lengths are remembered with their checksum: nearly all records have a common one.
_MOST_LENGTHS = 4096
#: What zlib is to expect around the data.
_WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}


class BadRecordError(Exception):
    """Where reading cannot go on. The offset is that in the plain stream of records."""

    def __init__(self, record: int, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.record = record
        self.offset = offset
        self.reason = reason


def checked_compression_type(value: object) -> str:
    """As TensorFlow takes it: "", None, "GZIP" or "ZLIB"."""
    if value is None:
        return ""
    if value not in COMPRESSION_TYPES:
        raise ValueError(
            f"compression_type: expected one of {COMPRESSION_TYPES} or None. Received: {value!r}"
        )
    return str(value)


def checked_record(record: Any) -> bytes:
    """The bytes of a record: as they are, or those of a protocol buffer."""
    data = _bytes_of(record)
    if len(data) > _MOST_RECORD_BYTES:
        raise ValueError(
            f"record: expected at most {_MOST_RECORD_BYTES:,} bytes. Received: {len(data):,}"
        )
    return data


def _bytes_of(record: Any) -> bytes:
    if isinstance(record, bytes):
        return record
    if isinstance(record, (bytearray, memoryview)):
        return bytes(record)
    if hasattr(record, "SerializeToString"):
        return bytes(record.SerializeToString())
    if hasattr(record, "numpy") and isinstance(record.numpy(), bytes):
        return bytes(record.numpy())
    raise TypeError(
        "record: expected bytes, or a message such as tf.train.Example. Received: "
        f"{type(record).__name__} {str(record)[:40]!r}"
    )


class Encoder:
    """Makes the bytes of a file from records.

    What it holds changes at one point in time, so that Ctrl-C finds a record in it or not.
    """

    def __init__(self, compression_type: str, level: int = -1) -> None:
        self._headers: dict[int, bytes] = {}
        self._bits = _WINDOW_BITS.get(compression_type)
        self._level = level
        self._packer = self._new_packer()
        self._parts: list[bytes] = []
        #: Of records that `take` has not given out.
        self.waiting_bytes = 0

    @property
    def waiting_records(self) -> int:
        return len(self._parts) // 3

    def add(self, record: bytes) -> None:
        length = len(record)
        header = self._headers.get(length)
        if header is None:
            header = self._header(length)
        crc = checksum_of(record)
        footer = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
        self._parts.extend((header, record, _FOOTER.pack(footer)))
        self.waiting_bytes += length + 16

    def take(self, *, end: bool = False) -> bytes:
        """The bytes for what was added since the last time; ``end``: there is no more."""
        data = b"".join(self._parts)
        self._parts.clear()
        self.waiting_bytes = 0
        if self._packer is None:
            return data
        data = bytes(self._packer.compress(data))
        return data + bytes(self._packer.flush()) if end else data

    def whole(self) -> bytes:
        """The bytes of a file of all that was added; nothing changes by that."""
        data = b"".join(self._parts)
        packer = self._new_packer()
        return data if packer is None else bytes(packer.compress(data) + packer.flush())

    def _new_packer(self) -> Any:
        return None if self._bits is None else zlib.compressobj(self._level, 8, self._bits)

    def _header(self, length: int) -> bytes:
        encoded = _LENGTH.pack(length)
        header = encoded + _FOOTER.pack(masked(checksum_of(encoded)))
        if len(self._headers) < _MOST_LENGTHS:
            self._headers[length] = header
        return header


def records_in(
    file: IO[bytes], compression_type: str, *, only_check: bool = False
) -> Iterator[tuple[int, bytes]]:
    """Each record with its offset in the plain stream; `BadRecordError` for the first bad one.

    ``only_check``: nobody needs the records, and large ones need not be in memory.
    """
    return _records(_reader(file, compression_type), only_check)


def compression_of(file: IO[bytes]) -> str:
    """By the first bytes of the file, which is left at its beginning."""
    start = file.read(_START_BYTES)
    file.seek(0)
    if looks_plain(start):
        return ""
    if start[:3] == b"\x1f\x8b\x08":
        return "GZIP"
    # Method 8, and a checksum within the first two bytes; some lengths of records look like that.
    if len(start) > 1 and start[0] & 0x0F == 8 and int.from_bytes(start[:2], "big") % 31 == 0:
        return "ZLIB" if _unpacks(start) else ""
    return ""


def _unpacks(start: bytes) -> bool:
    """Whether something comes out before an error."""
    stream = zlib.decompressobj(_WINDOW_BITS["ZLIB"])
    try:
        for at in range(len(start)):
            if stream.decompress(start[at : at + 1], 1) or stream.eof:
                return True
    except zlib.error:
        return False
    return False


def looks_plain(start: bytes) -> bool:
    """Whether a file that begins like this begins with a record, or is empty."""
    return not start or (len(start) >= _HEADER.size and has_header(start, 0))


def length_at(file: IO[bytes], offset: int) -> int | None:
    """The length of the record that begins there; None if it cannot be, or its checksum is not."""
    file.seek(offset)
    start = file.read(_HEADER.size)
    if len(start) < _HEADER.size or not has_header(start, 0):
        return None
    length = int(_LENGTH.unpack_from(start, 0)[0])
    return length if length <= _MOST_RECORD_BYTES else None


def is_record_at(file: IO[bytes], offset: int) -> bool:
    """Whether a whole record begins there."""
    file.seek(offset)
    try:
        return next(records_in(file, "", only_check=True), None) is not None
    except BadRecordError:
        return False


def has_header(data: bytes, position: int) -> bool:
    """Whether there is a length with its checksum."""
    _, crc = _HEADER.unpack_from(data, position)
    return masked(extended(0, data[position : position + 8])) == int(crc)


Reader = Callable[[int], bytes]


def _reader(file: IO[bytes], compression_type: str) -> Reader:
    """Reads at least one byte unless there is no more; raises `zlib.error`."""
    bits = _WINDOW_BITS.get(compression_type)
    return file.read if bits is None else _Unpacker(file, bits).read


class _Unpacker:
    """The plain bytes of a compressed file, which may be several streams one after another."""

    def __init__(self, file: IO[bytes], bits: int) -> None:
        self._file = file
        self._bits = bits
        self._stream = zlib.decompressobj(bits)
        self._rest = b""
        self._is_begun = False
        self._step = _BLOCK_BYTES

    def read(self, size: int) -> bytes:
        while True:
            packed = self._rest or self._file.read(_BLOCK_BYTES)
            if not packed:
                if self._is_begun and not self._stream.eof:
                    raise zlib.error("the compressed data is cut off")
                return b""
            if self._stream.eof:
                self._stream = zlib.decompressobj(self._bits)
            self._is_begun = True
            before = self._stream.copy()
            step = packed[: self._step]
            try:
                # Never more than was asked for: a small file may unpack to more than the memory.
                data = self._stream.decompress(step, size)
            except zlib.error:
                if self._step == 1:
                    raise
                # What comes before the damage is good: in smaller steps up to there.
                self._stream, self._rest, self._step = before, packed, self._step // 2
                continue
            left = self._stream.unconsumed_tail or self._stream.unused_data
            self._rest = left + packed[self._step :]
            if data:
                return data


def _records(read: Reader, only_check: bool) -> Iterator[tuple[int, bytes]]:
    """The loop that everything here spends its time in, so without a call where none is needed."""
    header, footer, checksum = _HEADER.unpack_from, _FOOTER.unpack_from, checksum_of
    lengths: dict[int, int] = {}
    buffer, position, number, base = b"", 0, 0, 0
    block = _FIRST_BLOCK_BYTES
    large_at: int | None = None  # Where the large record begins that is being checked.

    def fill(needed: int) -> bool:
        """Have so many bytes from the position on, if there are as many."""
        nonlocal buffer, position, base, block
        parts = [buffer[position:]]
        base += position
        position = 0
        have = len(parts[0])
        try:
            while have < needed:
                part = read(max(block, min(needed - have, 64 * _BLOCK_BYTES)))
                block = min(2 * block, _BLOCK_BYTES)
                if not part:
                    break
                parts.append(part)
                have += len(part)
        except zlib.error as error:
            raise BadRecordError(
                number,
                base if large_at is None else large_at,
                f"the compressed data is damaged ({error})",
            ) from None
        finally:
            buffer = b"".join(parts)
        return have >= needed

    while True:
        if len(buffer) - position < 12 and not fill(12):
            if position < len(buffer):
                raise BadRecordError(number, base, "the file is cut off in the length of a record")
            return
        length, crc = header(buffer, position)
        if lengths.get(length) != crc:
            if masked(checksum(buffer[position : position + 8])) != crc:
                raise BadRecordError(number, base + position, "the checksum of its length is wrong")
            if length > _MOST_RECORD_BYTES:
                raise BadRecordError(number, base + position, f"it claims {length:,} bytes")
            if len(lengths) < _MOST_LENGTHS:
                lengths[length] = crc
        if only_check and length > _LARGE_RECORD_BYTES:
            offset, left, crc = base + position, length, 0
            large_at = offset
            position += 12
            while left and (position < len(buffer) or fill(1)):
                piece = buffer[position : position + left]
                crc = extended(crc, piece)
                position += len(piece)
                left -= len(piece)
            if left or (len(buffer) - position < 4 and not fill(4)):
                have = length - left
                raise BadRecordError(
                    number, offset, f"the file is cut off after {have:,} of its {length:,} bytes"
                )
            if masked(crc) != footer(buffer, position)[0]:
                raise BadRecordError(number, offset, "the checksum of its bytes is wrong")
            yield offset, b""
            position += 4
            number += 1
            large_at = None
            continue
        if len(buffer) - position < length + 16 and not fill(length + 16):
            have = max(0, len(buffer) - 12)
            raise BadRecordError(
                number, base, f"the file is cut off after {have:,} of its {length:,} bytes"
            )
        start = position + 12
        stop = start + length
        record = buffer[start:stop]
        crc = checksum(record)
        if (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF != footer(buffer, stop)[0]:
            raise BadRecordError(number, base + position, "the checksum of its bytes is wrong")
        yield base + position, record
        position = stop + 4
        number += 1
