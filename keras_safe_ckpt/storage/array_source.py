"""The arrays of a checkpoint, one by one, whichever kind of checkpoint it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from keras_safe_ckpt.errors import CorruptCheckpointError, UnreadableCheckpointError
from keras_safe_ckpt.storage.bundles.bundle import Bundle
from keras_safe_ckpt.storage.bundles.entry_bytes import are_whole
from keras_safe_ckpt.storage.bundles.index import Entry, Index
from keras_safe_ckpt.storage.dtypes import dtype_from_name
from keras_safe_ckpt.storage.formats import format_of
from keras_safe_ckpt.storage.formats.format import OpenCheckpoint
from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.storage.paths import open_regular
from keras_safe_ckpt.storage.survey import is_bundle

#: The only "array" of a file whose arrays are not told apart.
_WHOLE = "(the whole file)"


@dataclass(frozen=True)
class ArrayFacts:
    """``digest`` can be compared with one of the same kind of checkpoint only."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    digest: str


class ArraySource(Protocol):
    """An open checkpoint. ``manifest`` is None for one of TensorFlow, which has none."""

    kind: str
    manifest: Manifest | None
    arrays: Mapping[str, ArrayFacts]

    def read(self, name: str) -> np.ndarray[Any, Any] | None:
        """The array, compared with its digest; None for texts and objects."""


@contextlib.contextmanager
def open_arrays(path: Path) -> Iterator[ArraySource]:
    """An error of the tree for whatever is not a checkpoint."""
    if is_bundle(path):
        yield _BundleArrays(Bundle(path.parent, path.name))
    else:
        with format_of(path).open(path) as checkpoint:
            yield _FileArrays(checkpoint)


class _FileArrays:
    kind = "keras"

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.manifest: Manifest | None = checkpoint.manifest
        self.arrays: Mapping[str, ArrayFacts] = {
            name: ArrayFacts(
                record.shape, dtype_from_name(record.dtype).name, record.nbytes, record.digest
            )
            for name, record in checkpoint.manifest.arrays.items()
        }
        if not self.arrays:
            # A file of Keras 2, which Keras wrote as a whole: it has one digest.
            manifest = checkpoint.manifest
            self.arrays = {_WHOLE: ArrayFacts((), "bytes", manifest.size, manifest.structure)}

    def read(self, name: str) -> np.ndarray[Any, Any] | None:
        return None if name == _WHOLE else self._checkpoint.read_array(name)


class _BundleArrays:
    kind = "tensorflow"
    manifest: Manifest | None = None

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        index: Index = bundle.check()
        self._shards = index.shards
        self._entries = {entry.name: entry for entry in index.entries}
        if len(self._entries) != len(index.entries):
            raise CorruptCheckpointError(bundle.prefix, "two of its tensors have the same name")
        self.arrays: Mapping[str, ArrayFacts] = {
            name: ArrayFacts(entry.shape, entry.dtype_name, entry.size, f"{entry.checksum:08x}")
            for name, entry in self._entries.items()
        }

    def read(self, name: str) -> np.ndarray[Any, Any] | None:
        entry = self._entries[name]
        dtype = _numbers(entry)
        if dtype is None:
            return None
        path = self._bundle.data(entry.shard, self._shards)
        data = bytearray(entry.size)
        try:
            with open_regular(path) as file:
                whole = are_whole(file.fileno(), entry)
                file.seek(entry.offset)
                place, view = 0, memoryview(data)
                while whole and place < entry.size:  # One call reads 2 GiB at most.
                    count = file.readinto(view[place:]) or 0
                    whole = count > 0
                    place += count
        except OSError as error:
            raise UnreadableCheckpointError(path, error) from error
        if not whole or entry.size != entry.count * dtype.itemsize:
            raise CorruptCheckpointError(
                self._bundle.prefix, f"the checksum of {entry.name!r} is wrong"
            )
        return np.frombuffer(data, dtype).reshape(entry.shape)


def _numbers(entry: Entry) -> np.dtype[Any] | None:
    """The type of its elements, if they are numbers of whole bytes that stand there as they are."""
    if entry.sliced or entry.dtype_name in ("string", "variant", "int4", "uint4"):
        return None
    try:
        return dtype_from_name(entry.dtype_name)
    except ValueError:
        return None
