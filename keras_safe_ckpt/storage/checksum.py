"""The checksum in the files of TensorFlow: CRC-32C, stored in a disguise."""

from __future__ import annotations

import google_crc32c

#: Of some bytes. The library's own function: it is called for every record of a file.
checksum_of = google_crc32c.value

_DISGUISE = 0xA282EAD8


def extended(crc: int, data: bytes) -> int:
    """The checksum of all that came before, and ``data``."""
    return int(google_crc32c.extend(crc, data))


def masked(crc: int) -> int:
    """As it is stored: a checksum of bytes that hold their own checksum would be weak."""
    return (((crc >> 15) | (crc << 17)) + _DISGUISE) & 0xFFFFFFFF
