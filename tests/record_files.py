"""TFRecord files for the tests, made and read without the code under test."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import google_crc32c


def masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return length + masked(length) + record + masked(record)


def plain_bytes(records: Iterable[bytes]) -> bytes:
    return b"".join(framed(record) for record in records)


def write_plain(path: Path, records: Iterable[bytes]) -> Path:
    path.write_bytes(plain_bytes(records))
    return path


def unpacked(path: Path) -> bytes:
    """The plain stream of records of a file of any compression."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        return gzip.decompress(data)
    return zlib.decompress(data) if data[:2] == b"\x78\x9c" else data


def records_of(path: Path) -> list[bytes]:
    """The records of a whole file."""
    data, found = unpacked(path), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        record = data[12 : 12 + length]
        assert data[: 16 + length] == framed(record), f"torn after {len(found)} records"
        found.append(record)
        data = data[16 + length :]
    return found


def flip(path: Path, offset: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.write_bytes(data)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
