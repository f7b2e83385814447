"""Look through a TFRecord file from its beginning to its end."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from keras_safe_ckpt.datasets.progress import Progress
from keras_safe_ckpt.datasets.record_format import (
    BadRecordError,
    compression_of,
    records_in,
)
from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    CorruptRecordError,
    SafeCheckpointError,
    UnreadableCheckpointError,
)
from keras_safe_ckpt.storage.checksum import extended

_SHOWN = {"": "plain", "GZIP": "GZIP", "ZLIB": "ZLIB"}


@dataclass(frozen=True)
class Scan:
    """A whole file that holds what it should, as far as it says itself."""

    records: int
    size: int
    checksum: int
    compression_type: str


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """For reading; errors in our words."""
    if path.exists() and not path.is_file():
        # A pipe of this name would be waited for, for ever.
        raise UnreadableCheckpointError(path, OSError(errno.EINVAL, "it is not a regular file"))
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(path, what="data") from error
    except OSError as error:
        raise UnreadableCheckpointError(path, error) from error
    with file:
        try:
            yield file
        except OSError as error:
            if isinstance(error, SafeCheckpointError):
                raise
            raise UnreadableCheckpointError(path, error) from error


def ensure_compression(path: Path, compression_type: str) -> None:
    """Raise if the file begins like one of another kind."""
    with opened(path) as file:
        found = compression_of(file)
        is_empty = not file.read(1)
    if found != compression_type and not is_empty:
        raise CorruptCheckpointError(
            path,
            f"expected compression_type={compression_type!r}, and the file begins like one with "
            f"{found!r} ({_SHOWN[found]})",
        )


def scan(path: Path, compression_type: str | None, *, progress: bool = False) -> Scan:
    """Every checksum of every record; `CorruptRecordError` for the first that does not hold.

    ``None`` finds out by itself how the file is compressed.
    """
    with ExitStack() as stack:
        file = stack.enter_context(opened(path))
        kind = compression_of(file) if compression_type is None else compression_type
        size = os.fstat(file.fileno()).st_size
        bar = stack.enter_context(Progress(f"Verifying {path.name}", size)) if progress else None
        source = _Summed(file, bar)
        number = 0
        try:
            for _ in records_in(source, kind, only_check=True):  # type: ignore[arg-type]
                number += 1
        except BadRecordError as bad:
            raise bad_record(path, bad, kind) from None
        return Scan(number, source.size, source.checksum, kind)


def bad_record(path: Path, bad: BadRecordError, compression_type: str) -> CorruptRecordError:
    """With the advice that fits: most files that look damaged are only compressed."""
    reason = bad.reason
    if bad.record == 0 and bad.offset == 0:
        with opened(path) as file:
            found = compression_of(file)
        if found != compression_type:
            reason += f"; it looks like a file with compression_type={found!r}"
    if compression_type and bad.offset:
        reason += " (the offset is that in the data without compression)"
    return CorruptRecordError(path, bad.record, bad.offset, reason)


class _Summed:
    """A file that counts and sums what is read of it."""

    def __init__(self, file: IO[bytes], progress: Progress | None) -> None:
        self._file = file
        self._progress = progress
        self.size = 0
        self.checksum = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.size += len(data)
        self.checksum = extended(self.checksum, data)
        if self._progress is not None:
            self._progress.advance(len(data))
        return data
