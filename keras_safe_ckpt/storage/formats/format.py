"""What a storage format must do; the two built-in ones are found by the name of a file."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from keras_safe_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from keras_safe_ckpt.storage.atomic import StagedFile
from keras_safe_ckpt.storage.formats.hdf5_image import ArraySpec, stored_dtype
from keras_safe_ckpt.storage.formats.hdf5_reader import Hdf5Reader
from keras_safe_ckpt.storage.manifest import ArrayRecord, Manifest
from keras_safe_ckpt.storage.snapshot import Snapshot

#: Arrays beside those of the model (an exact resume needs more than Keras saves) go below this
#: group of the HDF5 file, where Keras does not look.
EXTRA_GROUP = "keras_safe_ckpt/extra"


class OpenCheckpoint(ABC):
    """A checkpoint file that was opened: its manifest, and the HDF5 file in it."""

    manifest: Manifest
    _descriptor: int
    _reader: Hdf5Reader

    @abstractmethod
    def verify(self) -> None:
        """Compare every byte with the manifest; `CorruptCheckpointError` at the first doubt."""

    def read_array(self, name: str) -> np.ndarray[Any, Any]:
        """One array of the manifest, compared with its digest."""
        return self._reader.read_array(name, self.manifest.arrays[name])

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reader.close()
        os.close(self._descriptor)


class StorageFormat(Protocol):
    """How a snapshot becomes the bytes of one file, and back."""

    #: What the names of its files end in.
    suffix: str
    #: Whether the snapshot must hold the whole model, or only weights and optimizer.
    whole_model: bool

    def write(self, staged: StagedFile, snapshot: Snapshot, draft: Manifest) -> Manifest:
        """Write all of it, and return the draft completed with the digests."""

    def open(self, path: Path) -> OpenCheckpoint:
        """Open a file and read its manifest, which is checked; the arrays are not yet."""


@contextmanager
def open_for_reading(path: Path) -> Iterator[int]:
    """A descriptor of a regular file, closed again if the block raises.

    A pipe or a device under the name of a checkpoint would block or never end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(path) from error
    except OSError as error:
        raise CorruptCheckpointError(path, f"it cannot be opened ({error.strerror})") from error
    try:
        if not os.path.isfile(descriptor):
            raise CorruptCheckpointError(path, "it is not a regular file")
        yield descriptor
    except BaseException:
        os.close(descriptor)
        raise


def specs_and_records(
    arrays: dict[str, np.ndarray[Any, Any]],
) -> tuple[dict[str, ArraySpec], dict[str, ArrayRecord]]:
    """The arrays as HDF5 and as the manifest describe them; the digests are still blank."""
    specs = {path: ArraySpec.of(array) for path, array in arrays.items()}
    records = {
        path: ArrayRecord(spec.shape, stored_dtype(spec.dtype)) for path, spec in specs.items()
    }
    return specs, records
