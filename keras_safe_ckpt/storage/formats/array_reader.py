"""Read the arrays of an HDF5 file by the manifest, without HDF5 and without trust.

The manifest says where each array is. Nothing outside the file can be reached, nothing is
allocated that the file does not hold, and a damaged structure is found by its digest instead of
being followed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from keras_safe_ckpt.errors import CorruptCheckpointError
from keras_safe_ckpt.storage.dtypes import dtype_from_name
from keras_safe_ckpt.storage.formats.hdf5_image import CHUNK_BYTES, bytes_of
from keras_safe_ckpt.storage.formats.seekable import FileWindow
from keras_safe_ckpt.storage.manifest import ArrayRecord, Manifest
from keras_safe_ckpt.storage.tensor_array import empty_tensor_array


class ArrayReader:
    """The arrays of ``manifest`` in ``window``; every complaint names ``path``."""

    def __init__(self, window: FileWindow, manifest: Manifest, path: str) -> None:
        self._window = window
        self._manifest = manifest
        self._path = path
        #: Everything between the arrays: offset and size.
        self._gaps = self._find_gaps()

    def verify(self, advance: Callable[[int], None] | None = None) -> None:
        """Compare every byte with the manifest, in bounded memory.

        ``advance`` is told of each so many bytes that were compared.
        """
        structure = xxhash.xxh3_128()
        for offset, size in self._gaps:
            self._update(structure, offset, size, advance=advance)
        if structure.hexdigest() != self._manifest.structure:
            raise CorruptCheckpointError(
                self._path, "its HDF5 structure does not match the manifest's digest"
            )
        for name, record in self._manifest.arrays.items():
            digest = xxhash.xxh3_128()
            self._update(digest, record.offset, record.nbytes, advance=advance)
            self._compare(name, digest, record)

    def read_array(self, name: str) -> np.ndarray[Any, Any]:
        """One array, compared with its digest."""
        record = self._manifest.arrays[name]
        array = empty_tensor_array(record.shape, dtype_from_name(record.dtype))
        digest = xxhash.xxh3_128()
        self._update(digest, record.offset, record.nbytes, into=bytes_of(array))
        self._compare(name, digest, record)
        return array

    def _find_gaps(self) -> list[tuple[int, int]]:
        """Make sure that all arrays are in the file and that none shares a byte with another."""
        size = self._manifest.size
        if size != self._window.size:
            raise CorruptCheckpointError(
                self._path, f"it has {self._window.size} bytes, the manifest says {size}"
            )
        taken = sorted(
            (record.offset, record.nbytes)
            for record in self._manifest.arrays.values()
            if record.nbytes
        )
        gaps, position = [], 0
        for offset, nbytes in [*taken, (size, 0)]:
            if offset < position:
                raise CorruptCheckpointError(
                    self._path, "its arrays overlap, or reach beyond the end of the file"
                )
            gaps.append((position, offset - position))
            position = offset + nbytes
        return gaps

    def _compare(self, name: str, digest: xxhash.xxh3_128, record: ArrayRecord) -> None:
        if digest.hexdigest() != record.digest:
            raise CorruptCheckpointError(
                self._path, f"the data of {name!r} does not match its digest"
            )

    def _update(
        self,
        digest: xxhash.xxh3_128,
        offset: int,
        nbytes: int,
        *,
        into: memoryview | None = None,
        advance: Callable[[int], None] | None = None,
    ) -> None:
        # Hashed chunk by chunk while each is still in the processor's cache.
        buffer = memoryview(bytearray(min(nbytes, CHUNK_BYTES))) if into is None else into
        for start in range(0, nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, nbytes - start)
            view = buffer[:size] if into is None else into[start : start + size]
            if self._window.read_at(offset + start, view) < size:
                raise CorruptCheckpointError(self._path, "it ends too early")
            digest.update(view)
            if advance is not None:
                advance(size)
