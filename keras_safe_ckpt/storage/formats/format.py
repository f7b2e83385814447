"""What a storage format must do; the two built-in ones are found by the name of a file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
    SafeCheckpointError,
    UnreadableCheckpointError,
)
from keras_safe_ckpt.storage.atomic import StagedFile
from keras_safe_ckpt.storage.formats.array_reader import ArrayReader
from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.storage.paths import let_go
from keras_safe_ckpt.storage.snapshot import Snapshot

#: Arrays beside those of the model (an exact resume needs more than Keras saves) go below this
#: group of the HDF5 file, where Keras does not look.
EXTRA_GROUP = "keras_safe_ckpt/extra"


class OpenCheckpoint:
    """A checkpoint file that was opened: its manifest, and the arrays that it names."""

    manifest: Manifest
    _path: str
    _descriptor: int
    _reader: ArrayReader

    def verify(self, advance: Callable[[int], None] | None = None) -> None:
        """Compare every byte with the manifest; `CorruptCheckpointError` at the first doubt.

        ``advance`` is told of each so many bytes that were compared.
        """
        with damage_reported(self._path):
            self._reader.verify(advance)

    def read_array(self, name: str) -> np.ndarray[Any, Any]:
        """One array of the manifest, compared with its digest."""
        with damage_reported(self._path):
            return self._reader.read_array(name)

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        let_go(self._descriptor)


class StorageFormat(Protocol):
    """How a snapshot becomes the bytes of one file, and back."""

    #: What the names of its files end in.
    suffix: str
    #: Whether the snapshot must hold the whole model, or only weights and optimizer.
    whole_model: bool

    def capture(self, model: Any, scratch: Path | None) -> Snapshot:
        """What the model is now, on the thread that trains; ``scratch`` has room for a file."""

    def write(self, staged: StagedFile, snapshot: Snapshot, draft: Manifest) -> Manifest:
        """Write all of it, and return the draft completed with the digests."""

    def open(self, path: Path) -> OpenCheckpoint:
        """Open a file and read its manifest, which is checked; the arrays are not yet."""


def read_back(format: StorageFormat, staged: StagedFile, manifest: Manifest) -> None:
    """Find out before anything is replaced whether what was written can be read."""
    try:
        with format.open(staged.temp_path) as written:
            same = written.manifest.to_json() == manifest.to_json()
    except SafeCheckpointError as error:
        raise CheckpointWriteError(staged.target, str(error), staged.step) from error
    if not same:
        raise CheckpointWriteError(
            staged.target, "it reads back differently from what was written", staged.step
        )


#: A file that gives one of these may be whole: it could only not be read now.
NOT_ITS_FAULT = (
    errno.EACCES, errno.EAGAIN, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
    errno.ENOTCONN, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT,
)  # fmt: skip


@contextmanager
def damage_reported(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever a damaged or hostile file makes a parser raise becomes an error of the tree."""
    try:
        yield
    except SafeCheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(path) from error
    except OSError as error:
        if error.errno in NOT_ITS_FAULT:
            raise UnreadableCheckpointError(path, error) from error
        raise CorruptCheckpointError(path, f"it cannot be read ({error})") from error
    except Exception as error:
        raise CorruptCheckpointError(
            path, f"it cannot be understood ({type(error).__name__}: {error})"
        ) from error


@contextmanager
def opened_for_reading(path: Path) -> Iterator[int]:
    """A descriptor of a regular file, closed again if the block raises.

    A pipe or a device under the name of a checkpoint would block or never end.
    """
    with damage_reported(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            # Not `os.path.isfile`, to which a disk that cannot be read is no file: what it cannot
            # tell about may be whole, and must not be taken for damaged.
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CorruptCheckpointError(path, "it is not a regular file")
            yield descriptor
        except BaseException:
            let_go(descriptor)
            raise
