"""The files a checkpoint can be: one module each."""

from __future__ import annotations

from pathlib import Path

from keras_safe_ckpt.errors import CorruptCheckpointError
from keras_safe_ckpt.storage.formats.format import StorageFormat
from keras_safe_ckpt.storage.formats.keras_zip import KerasZip
from keras_safe_ckpt.storage.formats.legacy_h5 import LegacyH5
from keras_safe_ckpt.storage.formats.weights_h5 import WeightsH5

FORMATS: dict[str, StorageFormat] = {
    "keras": KerasZip(),
    "weights_h5": WeightsH5(),
    "legacy_h5": LegacyH5(),  # After weights_h5, whose names end in .h5 as well.
}


def format_of(path: Path) -> StorageFormat:
    """The format that files of this name have."""
    for known in FORMATS.values():
        if path.name.endswith(known.suffix):
            return known
    endings = " or ".join(known.suffix for known in FORMATS.values())
    raise CorruptCheckpointError(path, f"expected a name that ends in {endings}")
