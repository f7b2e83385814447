"""``.weights.h5``: weights and optimizer, as ``model.load_weights`` reads them.

The manifest is a dataset of bytes in the same file (an HDF5 attribute ends at 64 KiB).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np

from keras_safe_ckpt.storage.atomic import StagedFile
from keras_safe_ckpt.storage.formats.format import (
    OpenCheckpoint,
    open_for_reading,
    specs_and_records,
)
from keras_safe_ckpt.storage.formats.hdf5_image import ArraySpec, ImageWriter, lay_out
from keras_safe_ckpt.storage.formats.hdf5_reader import FileWindow, Hdf5Reader
from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.storage.snapshot import Snapshot

MANIFEST_DATASET = "keras_safe_ckpt/manifest"

#: The manifest is padded with blanks to a multiple of this, so that a longer number in it does
#: not change the layout of the file and its plan can be used again.
_MANIFEST_ROOM = 4096


class WeightsH5:
    """Keras's ``.weights.h5`` with a manifest inside."""

    suffix = ".weights.h5"
    whole_model = False

    def write(self, staged: StagedFile, snapshot: Snapshot, draft: Manifest) -> Manifest:
        arrays = snapshot.host_arrays()
        specs, records = specs_and_records(arrays)
        draft = dataclasses.replace(draft, arrays=records)
        # Digests have one length, so the room is known before they are.
        room = -(-len(draft.to_json()) // _MANIFEST_ROOM) * _MANIFEST_ROOM
        specs[MANIFEST_DATASET] = ArraySpec((room,), np.dtype(np.uint8))
        image = lay_out(snapshot.groups, specs)
        writer = ImageWriter(image, deferred=frozenset([MANIFEST_DATASET]))
        for chunk in writer.chunks(arrays):
            staged.write(chunk)
        manifest = dataclasses.replace(
            draft,
            structure=writer.structure_digest,
            arrays={
                path: dataclasses.replace(record, digest=writer.digests[path])
                for path, record in records.items()
            },
        )
        staged.write_at(image.offset_of(MANIFEST_DATASET), manifest.to_json().ljust(room))
        return manifest

    def open(self, path: Path) -> OpenWeightsH5:
        return OpenWeightsH5(path)


class OpenWeightsH5(OpenCheckpoint):
    """An open ``.weights.h5`` file."""

    def __init__(self, path: Path) -> None:
        with open_for_reading(path) as descriptor:
            window = FileWindow(descriptor, 0, os.fstat(descriptor).st_size)
            self._reader = Hdf5Reader(window, str(path))
            data = self._reader.read_bytes(MANIFEST_DATASET)
            self.manifest = Manifest.from_json(data, str(path))
        self._descriptor = descriptor

    def verify(self) -> None:
        self._reader.verify(self.manifest)
        where = self._reader.locate(MANIFEST_DATASET)
        self._reader.check_structure(self.manifest, {MANIFEST_DATASET: where})
