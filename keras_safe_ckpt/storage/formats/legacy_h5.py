"""``.h5``: the whole model in the HDF5 format of Keras 2, which Keras 3 still writes.

Keras builds the file itself, on the training thread; what follows is as safe as for the others,
but training waits for it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import xxhash

from keras_safe_ckpt.storage.atomic import StagedFile
from keras_safe_ckpt.storage.formats.weights_h5 import WeightsH5, append_manifest
from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.storage.snapshot import Snapshot, capture_file

_FILE = "model.h5"


class LegacyH5(WeightsH5):
    """Keras's own ``.h5`` file with a manifest behind it; its arrays are not listed one by one."""

    suffix = ".h5"
    whole_model = True

    def capture(self, model: Any, scratch: Path | None) -> Snapshot:
        return capture_file(model, _FILE, scratch)

    def write(self, staged: StagedFile, snapshot: Snapshot, draft: Manifest) -> Manifest:
        content = snapshot.assets[_FILE]
        staged.write(content)
        digest = xxhash.xxh3_128(content).hexdigest()
        manifest = dataclasses.replace(draft, size=len(content), structure=digest)
        append_manifest(staged, manifest)
        return manifest
