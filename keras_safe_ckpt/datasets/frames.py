"""What a feeder says to the owner of a file, as bytes with a digest: a frame."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from keras_safe_ckpt.datasets.rows import Array

#: Magic, number of bytes of the description and of the rows, digest of both.
HEADER = struct.Struct("<4sIQQ")
MAGIC = b"ksf1"
MOST_DESCRIPTION_BYTES = 1 << 20


@dataclass(frozen=True)
class Message:
    """What a feeder says: rows for a dataset, or (``name`` is empty) that it waits for a commit."""

    name: str = ""
    rows: Any = None
    compression: str | int | None = None
    attributes: dict[str, Any] | None = None
    #: Whether the feeder waits to hear if this was accepted.
    asks: bool = False
    #: Whether the rows came as an array: a list has no type of its own.
    has_type: bool = True


def encoded(message: Message) -> list[bytes | memoryview]:
    """The parts of a frame, the rows without a copy."""
    facts: dict[str, Any] = {
        "name": message.name,
        "compression": message.compression,
        "asks": message.asks,
        "has_type": message.has_type,
    }
    if message.attributes:
        facts["attributes"] = {
            key: _packed(np.asarray(value)) for key, value in message.attributes.items()
        }
    parts: list[bytes | memoryview] = []
    rows = message.rows
    if rows is not None:
        facts["shape"] = rows.shape
        if rows.dtype.kind == "O":
            facts["dtype"] = "text"
            texts = [_bytes(value) for value in rows.flat]
            parts = [np.array([len(text) for text in texts], "<i8").tobytes(), b"".join(texts)]
        else:
            facts["dtype"] = rows.dtype.str
            parts = [np.ascontiguousarray(rows).data.cast("B")] if rows.size else []
    description = json.dumps(facts).encode()
    if len(description) > MOST_DESCRIPTION_BYTES:
        raise ValueError(
            f"{message.name!r}: expected attributes of a megabyte in all at most. Received: "
            f"{len(description):,} bytes; make them datasets"
        )
    digest = xxhash.xxh3_64(description)
    for part in parts:
        digest.update(part)
    size = sum(len(part) for part in parts)
    return [HEADER.pack(MAGIC, len(description), size, digest.intdigest()), description, *parts]


def decoded(description: bytes, data: memoryview) -> Message:
    facts = json.loads(description)
    rows = None
    if "dtype" in facts:
        shape = tuple(facts["shape"])
        if facts["dtype"] == "text":
            rows = _texts(data, shape)
        else:
            rows = np.frombuffer(data, np.dtype(facts["dtype"])).reshape(shape)
    attributes = {key: _unpacked(value) for key, value in facts.get("attributes", {}).items()}
    return Message(
        facts["name"], rows, facts["compression"], attributes, facts["asks"], facts["has_type"]
    )


def _packed(array: Array) -> dict[str, Any]:
    """An array as JSON holds it, with its type."""
    is_text = array.dtype.kind == "O"
    data = [_bytes(value).hex() for value in array.flat] if is_text else array.tobytes().hex()
    return {"shape": array.shape, "dtype": "text" if is_text else array.dtype.str, "data": data}


def _unpacked(found: dict[str, Any]) -> Array:
    shape = tuple(found["shape"])
    if found["dtype"] == "text":
        texts = np.empty(len(found["data"]), object)
        texts[:] = [bytes.fromhex(text) for text in found["data"]]
        return texts.reshape(shape)
    return np.frombuffer(bytes.fromhex(found["data"]), np.dtype(found["dtype"])).reshape(shape)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _texts(data: memoryview, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape, dtype=object))
    if not 0 <= 8 * count <= len(data):
        raise ValueError(f"{count:,} texts in {len(data):,} bytes")
    lengths = np.frombuffer(data[: 8 * count], "<i8")
    texts = np.empty(count, object)
    position = 8 * count
    for number, length in enumerate(lengths.tolist()):
        texts[number] = bytes(data[position : position + length])
        position += length
    return texts.reshape(shape)
