"""How long a text in an HDF5 file can be, found without HDF5.

Texts lie in heaps, and a dataset or attribute holds references to them: any number may lead to the
same text, so a small file can make HDF5 fill the memory, and HDF5 tells nobody beforehand. But no
text is longer than the heap that it is in, and heaps begin with a mark.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

_MARK = b"GCOL\x01"
#: The mark, three bytes that mean nothing, and the size.
_HEAD_BYTES = 16
_BLOCK_BYTES = 8 << 20


def longest_text(path: Path) -> int:
    """No text in the file has more bytes. Data that looks like a heap makes it larger, never less.

    (Where sizes have fewer than eight bytes, what follows them makes it larger as well.)
    """
    longest, head = 0, b""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            data = head + block
            place = data.find(_MARK)
            while 0 <= place <= len(data) - _HEAD_BYTES:
                size = int.from_bytes(data[place + 8 : place + _HEAD_BYTES], "little")
                longest = max(longest, size)
                place = data.find(_MARK, place + 1)
            head = data[-_HEAD_BYTES + 1 :]
        return min(longest, file.tell())


def texts_in(dtype: np.dtype[Any]) -> int:
    """How many texts of any length one element holds; those of a fixed one are in their place."""
    if dtype.fields:
        return sum(texts_in(part) for part, *_ in dtype.fields.values())
    if dtype.subdtype:
        part, shape = dtype.subdtype
        return int(np.prod(shape, dtype=object)) * texts_in(part)
    return int(dtype.kind == "O" and h5py.check_string_dtype(dtype) is not None)


def text_bytes(block: np.ndarray[Any, Any]) -> int:
    """How many bytes the texts of an array have, each one at least."""
    if block.dtype.fields:
        return sum(text_bytes(block[name]) for name in block.dtype.fields)
    if block.dtype.kind != "O":
        return 0
    return sum(max(1, len(text)) for text in block.flat)
