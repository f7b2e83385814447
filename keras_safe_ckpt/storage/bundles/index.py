"""The index of a checkpoint of TensorFlow: which tensors it has, and where their bytes are."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnreadableCheckpointError,
)
from keras_safe_ckpt.storage.bundles.table import TableError, read_table, read_varint
from keras_safe_ckpt.storage.paths import open_regular

_LARGEST_INDEX_BYTES = 1 << 28
_MOST_SHARDS = 99_999  # Five digits in the name of a file.
_MOST_DIMENSIONS = 254  # As TensorFlow has it.
#: TensorFlow's numbers of the types that variables have.
_DTYPE_NAMES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 7: "string",
    8: "complex64", 9: "int64", 10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128",
    19: "float16", 21: "variant", 22: "uint32", 23: "uint64", 24: "float8_e5m2",
    25: "float8_e4m3fn", 29: "int4", 30: "uint4",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor. ``sliced``: its bytes are in other entries, a part of it each."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    sliced: bool

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype_name(self) -> str:
        return _DTYPE_NAMES.get(self.dtype, f"type {self.dtype}")


@dataclass(frozen=True)
class Index:
    """All tensors of a checkpoint, whose bytes are in ``shards`` files."""

    shards: int
    entries: tuple[Entry, ...]

    def least_sizes(self) -> list[int]:
        """How long each of the data files must be."""
        sizes = [0] * self.shards
        for entry in self.entries:
            sizes[entry.shard] = max(sizes[entry.shard], entry.offset + entry.size)
        return sizes


def read_index(path: Path) -> Index:
    """Raises an error of the tree for whatever is not a whole index."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_INDEX_BYTES:
                raise CorruptCheckpointError(path, "it is too large for an index")
            data = file.read()
    except FileNotFoundError:
        raise CheckpointNotFoundError(path) from None
    except OSError as error:
        raise UnreadableCheckpointError(path, error) from error
    try:
        return _parsed(data)
    except TableError as error:
        raise CorruptCheckpointError(path, str(error)) from None


def _parsed(data: bytes) -> Index:
    shards, entries = None, []
    for key, value in read_table(data):
        if shards is None:
            if key:
                raise TableError("it does not say how many data files there are")
            shards = _number(dict(_fields(value)), 1)
            if not 1 <= shards <= _MOST_SHARDS:
                raise TableError(f"it speaks of {shards} data files")
            continue
        entry = _entry(key, value)
        if entry.shard >= shards:
            raise TableError(f"a tensor is in data file {entry.shard} of {shards}")
        entries.append(entry)
    if shards is None:
        raise TableError("it is empty")
    index = Index(shards, tuple(entries))
    if sum(entry.size for entry in entries) > sum(index.least_sizes()):
        # Any number of tensors could have the same bytes, to be read as often.
        raise TableError("its tensors overlap")
    return index


def _entry(key: bytes, value: bytes) -> Entry:
    fields: dict[int, int | bytes] = {}
    sliced = False
    shape: tuple[int, ...] = ()
    for number, content in _fields(value):
        fields[number] = content
        sliced = sliced or number == 7
        if number == 2 and isinstance(content, bytes):
            shape = _dimensions(content)
    return Entry(
        # Parts of a sliced tensor have names that are no text; two must not become one.
        name=key.decode(errors="backslashreplace"),
        dtype=_number(fields, 1),
        shape=shape,
        shard=_number(fields, 3),
        offset=_number(fields, 4),
        size=_number(fields, 5),
        checksum=_number(fields, 6),
        sliced=sliced,
    )


def _dimensions(shape: bytes) -> tuple[int, ...]:
    lengths = [
        _number(dict(_fields(dimension)), 1)
        for number, dimension in _fields(shape)
        if number == 2 and isinstance(dimension, bytes)
    ]
    if len(lengths) > _MOST_DIMENSIONS:
        raise TableError(f"a tensor of {len(lengths):,} dimensions")
    return tuple(lengths)


def _number(fields: dict[int, int | bytes], key: int) -> int:
    value = fields.get(key, 0)
    if not isinstance(value, int) or value >= 1 << 63:
        raise TableError("an entry of it makes no sense")
    return value


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol buffer, by number."""
    position = 0
    while position < len(message):
        tag, position = read_varint(message, position)
        kind, length = tag & 7, 0
        if kind == 0:
            value, position = read_varint(message, position)
            yield tag >> 3, value
            continue
        if kind == 2:
            length, position = read_varint(message, position)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise TableError("an entry of it makes no sense")
        content = message[position : position + length]
        if len(content) != length:
            raise TableError("an entry of it is cut off")
        position += length
        yield tag >> 3, content if kind == 2 else int.from_bytes(content, "little")
