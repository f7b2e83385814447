"""``.weights.h5``: weights and optimizer, as ``model.load_weights`` reads them.

The manifest follows the HDF5 file, where HDF5 does not look, and is found from the end::

    HDF5 file | manifest (JSON) | its length (8 bytes, little endian) | b"keras_safe_ckpt1"

Inside, as a dataset, it could only be reached through HDF5, and a single damaged byte can make
that loop and allocate for ever.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from keras_safe_ckpt.errors import CorruptCheckpointError
from keras_safe_ckpt.storage.atomic import StagedFile
from keras_safe_ckpt.storage.formats.array_reader import ArrayReader
from keras_safe_ckpt.storage.formats.format import OpenCheckpoint, opened_for_reading
from keras_safe_ckpt.storage.formats.hdf5_image import ImageWriter
from keras_safe_ckpt.storage.formats.seekable import FileWindow
from keras_safe_ckpt.storage.manifest import LARGEST_BYTES, Manifest
from keras_safe_ckpt.storage.snapshot import Snapshot, capture

_MAGIC = b"keras_safe_ckpt1"
_FOOTER_BYTES = 8 + len(_MAGIC)


class WeightsH5:
    """Keras's ``.weights.h5`` with a manifest behind it."""

    suffix = ".weights.h5"
    whole_model = False

    def capture(self, model: Any, scratch: Path | None) -> Snapshot:
        return capture(model, scratch=scratch)

    def write(self, staged: StagedFile, snapshot: Snapshot, draft: Manifest) -> Manifest:
        writer = ImageWriter(snapshot.groups, snapshot.host_arrays())
        for chunk in writer.chunks():
            staged.write(chunk)
        manifest = writer.complete(draft)
        append_manifest(staged, manifest)
        return manifest

    def open(self, path: Path) -> OpenCheckpoint:
        return OpenWeightsH5(path)


def append_manifest(staged: StagedFile, manifest: Manifest) -> None:
    """The end of the file: manifest, its length, and the mark by which it is found."""
    data = manifest.to_json()
    staged.write(data + len(data).to_bytes(8, "little") + _MAGIC)


class OpenWeightsH5(OpenCheckpoint):
    """An open ``.weights.h5`` file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        with opened_for_reading(path) as descriptor:
            self._descriptor = descriptor
            size = os.fstat(descriptor).st_size
            file = FileWindow(descriptor, 0, size)
            footer = bytearray(_FOOTER_BYTES)
            file.read_at(max(0, size - _FOOTER_BYTES), memoryview(footer))
            if footer[8:] != _MAGIC:
                raise CorruptCheckpointError(
                    path,
                    "it is cut off, or was not written by this library (no manifest); Keras itself "
                    "may open it",
                )
            length = int.from_bytes(footer[:8], "little")
            if length > min(LARGEST_BYTES, size - _FOOTER_BYTES):
                raise CorruptCheckpointError(path, f"its manifest has {length} bytes")
            data = bytearray(length)
            end = size - _FOOTER_BYTES - length
            file.read_at(end, memoryview(data))
            self.manifest = Manifest.from_json(bytes(data), self._path)
            self._reader = ArrayReader(FileWindow(descriptor, 0, end), self.manifest, self._path)
