"""Read an HDF5 file that may lie, by bytes rather than by trust.

Every array is looked up component by component (no links are followed), must be stored in one
piece inside the file, and is read straight from there, so that nothing declared can make us read
or allocate more than the file holds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import xxhash

from keras_safe_ckpt.errors import CorruptCheckpointError
from keras_safe_ckpt.storage.formats.hdf5_image import (
    CHUNK_BYTES,
    SeekableFile,
    bytes_of,
    stored_dtype,
)
from keras_safe_ckpt.storage.manifest import LARGEST_BYTES, ArrayRecord, Manifest
from keras_safe_ckpt.storage.tensor_array import empty_tensor_array


@dataclass(frozen=True)
class StoredArray:
    """Where the bytes of an array are, counted from the start of the HDF5 file."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class FileWindow(SeekableFile):
    """``size`` bytes from ``start`` of an open file, as a file of its own.

    Read with pread: no shared position, and the same descriptor, so that a file which is
    replaced or removed meanwhile is still the one that was opened.
    """

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        super().__init__(size)
        self._descriptor = descriptor
        self._start = start

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self.size - self._position)]
        done = self.read_at(self._position, view)
        self._position += done
        return done

    def read_at(self, offset: int, view: memoryview) -> int:
        """Fill ``view`` from ``offset``; fewer bytes only where the file ends."""
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], self._start + offset + done)
            if count == 0:
                break
            done += count
        return done


class Hdf5Reader:
    """The HDF5 file in ``window``; every complaint names ``path``."""

    def __init__(self, window: FileWindow, path: str) -> None:
        self._window = window
        self._path = path
        self._groups: dict[str, h5py.Group] = {}
        self._known: dict[str, StoredArray] = {}
        try:
            self._file = h5py.File(window, "r")
        except (OSError, ValueError, RuntimeError) as error:
            raise CorruptCheckpointError(path, f"it is not a whole HDF5 file ({error})") from error

    def close(self) -> None:
        self._file.close()

    def locate(self, name: str) -> StoredArray:
        """Find an array and make sure that all of it is in this very file."""
        if name not in self._known:
            self._known[name] = self._locate(name)
        return self._known[name]

    def _locate(self, name: str) -> StoredArray:
        try:
            dataset = self._walk(name)
            dtype, offset = dataset.dtype, dataset.id.get_offset()
            if dataset.external or dataset.is_virtual:
                raise CorruptCheckpointError(self._path, f"{name!r} is stored in another file")
            if dataset.id.get_create_plist().get_layout() != h5py.h5d.CONTIGUOUS:
                raise CorruptCheckpointError(self._path, f"{name!r} is not stored in one piece")
            if dataset.attrs.get("dtype") == "bfloat16":
                dtype = _bfloat16()
            shape = tuple(int(n) for n in dataset.shape or ())
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            if isinstance(error, CorruptCheckpointError):
                raise
            raise CorruptCheckpointError(
                self._path, f"{name!r} cannot be read ({error})"
            ) from error
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        if dtype.hasobject:
            raise CorruptCheckpointError(self._path, f"{name!r} holds references, not numbers")
        if nbytes and (offset is None or offset + nbytes > self._window.size):
            raise CorruptCheckpointError(self._path, f"{name!r} reaches beyond the end of the file")
        return StoredArray(offset or 0, nbytes, shape, dtype)

    def _walk(self, name: str) -> h5py.Dataset:
        parent, _, last = name.rpartition("/")
        node = self._step(self._group(parent), last, name)
        if not isinstance(node, h5py.Dataset):
            raise CorruptCheckpointError(self._path, f"{name!r} is not an array")
        return node

    def _group(self, name: str) -> h5py.Group:
        if not name:
            return self._file
        if name not in self._groups:
            parent, _, last = name.rpartition("/")
            node = self._step(self._group(parent), last, name)
            if not isinstance(node, h5py.Group):
                raise CorruptCheckpointError(self._path, f"{name!r} is not a group")
            self._groups[name] = node
        return self._groups[name]

    def _step(self, group: h5py.Group, part: str, name: str) -> Any:
        link = group.get(part, getlink=True)
        if link is None:
            raise CorruptCheckpointError(self._path, f"{name!r} is missing")
        if not isinstance(link, h5py.HardLink):
            raise CorruptCheckpointError(self._path, f"{name!r} is a link")
        return group[part]

    def read_bytes(self, name: str, limit: int = LARGEST_BYTES) -> bytes:
        """All of a small array; for the manifest."""
        where = self.locate(name)
        if where.nbytes > limit:
            raise CorruptCheckpointError(self._path, f"{name!r} has {where.nbytes} bytes")
        buffer = bytearray(where.nbytes)
        self._read(where.offset, memoryview(buffer))
        return bytes(buffer)

    def read_array(self, name: str, record: ArrayRecord) -> np.ndarray[Any, Any]:
        """One array, compared with its digest."""
        where = self._located(name, record)
        array = empty_tensor_array(where.shape, where.dtype)
        digest = self._digest(where.offset, where.nbytes, into=bytes_of(array))
        self._compare(name, digest, record)
        return array

    def verify(self, manifest: Manifest) -> None:
        """Compare every byte of the file with the manifest, in bounded memory."""
        for name, record in manifest.arrays.items():
            where = self._located(name, record)
            self._compare(name, self._digest(where.offset, where.nbytes), record)

    def check_structure(self, manifest: Manifest, other: Mapping[str, StoredArray]) -> None:
        """Compare all that is neither an array of the manifest nor one of ``other``."""
        taken = sorted(
            (where.offset, where.nbytes)
            for where in [*map(self.locate, manifest.arrays), *other.values()]
            if where.nbytes
        )
        digest = xxhash.xxh3_128()
        position = 0
        for offset, nbytes in [*taken, (self._window.size, 0)]:
            if offset < position:
                raise CorruptCheckpointError(self._path, "two of its arrays overlap")
            self._update(digest, position, offset - position)
            position = offset + nbytes
        if digest.hexdigest() != manifest.structure:
            raise CorruptCheckpointError(
                self._path, "its HDF5 structure does not match the manifest's digest"
            )

    def _located(self, name: str, record: ArrayRecord) -> StoredArray:
        where = self.locate(name)
        stored = f"{stored_dtype(where.dtype)}{list(where.shape)}"
        expected = f"{record.dtype}{list(record.shape)}"
        if stored != expected:
            raise CorruptCheckpointError(
                self._path, f"{name!r} is {stored}, the manifest says {expected}"
            )
        return where

    def _compare(self, name: str, digest: str, record: ArrayRecord) -> None:
        if digest != record.digest:
            raise CorruptCheckpointError(
                self._path, f"the data of {name!r} does not match its digest"
            )

    def _digest(self, offset: int, nbytes: int, into: memoryview | None = None) -> str:
        digest = xxhash.xxh3_128()
        self._update(digest, offset, nbytes, into)
        return digest.hexdigest()

    def _update(
        self, digest: xxhash.xxh3_128, offset: int, nbytes: int, into: memoryview | None = None
    ) -> None:
        # Hashed chunk by chunk while each is still in the processor's cache.
        buffer = memoryview(bytearray(min(nbytes, CHUNK_BYTES))) if into is None else into
        for start in range(0, nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, nbytes - start)
            view = buffer[:size] if into is None else into[start : start + size]
            self._read(offset + start, view)
            digest.update(view)

    def _read(self, offset: int, view: memoryview) -> None:
        try:
            count = self._window.read_at(offset, view)
        except OSError as error:
            raise CorruptCheckpointError(self._path, f"it cannot be read ({error})") from error
        if count < len(view):
            raise CorruptCheckpointError(self._path, "it ends too early")


def _bfloat16() -> np.dtype[Any]:
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype
