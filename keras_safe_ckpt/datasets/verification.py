"""Is a TFRecord file whole, what can be saved of it, and how to cut one into shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from keras_safe_ckpt.datasets.progress import Progress
from keras_safe_ckpt.datasets.record_count import noted
from keras_safe_ckpt.datasets.record_format import (
    BadRecordError,
    checked_compression_type,
    compression_of,
    is_record_at,
    length_at,
    records_in,
)
from keras_safe_ckpt.datasets.scanning import bad_record, opened, scan
from keras_safe_ckpt.datasets.shards import shard_path
from keras_safe_ckpt.datasets.shared_reading import reading, resolved
from keras_safe_ckpt.datasets.tfrecord import RecordFileWriter
from keras_safe_ckpt.errors import CorruptRecordError
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.locks import chosen_locks
from keras_safe_ckpt.storage.paths import absolute
from keras_safe_ckpt.storage.translation import reading_only

#: How much of a damaged file is looked through at once: at first, and at most.
_FIRST_SEARCH_BYTES = 4 << 10
_SEARCH_BYTES = 4 << 20
#: How often a damaged file may be read to find what is good in it. Damage does not come to that:
#: it takes lengths, with checksums that hold, of records that lie in each other and are all bad.
_MOST_READINGS = 16
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class RecordReport:
    """What ``verify_tfrecord`` found: all checksums hold.

    ``is_counted``: a count is kept beside the file, and it is this one. Without one nobody can
    tell whether records are missing at the end.
    """

    path: Path
    records: int
    size: int
    compression_type: str
    is_counted: bool


@dataclass(frozen=True)
class RepairReport:
    """What ``repair_tfrecord`` did: how many records were kept, and which bytes were left out.

    ``left_out`` are ranges ``(begin, end)`` of the file; for a compressed one of the data in it,
    and the end is not known (-1).
    """

    path: Path
    records: int
    left_out: tuple[tuple[int, int], ...]


def verify_tfrecord(
    path: str | os.PathLike[str],
    *,
    compression_type: str | None = None,
    locks: Locks | None = None,
) -> RecordReport:
    """Check every checksum of a TFRecord file, and how many records there are.

    Args:
        path: the file.
        compression_type: "", "GZIP" or "ZLIB"; None finds out by itself.
        locks: a `LockManager` or `RedisLocks`: nobody writes meanwhile.

    Raises:
        CorruptRecordError: with ``record`` and ``offset`` of the first that is bad, or where
            records are missing.

    TensorFlow is not needed.

    Example::

        report = verify_tfrecord("data/train-00003-of-00008.tfrecord")
        print(report.records, "records,", report.is_counted)
    """
    kind = None if compression_type is None else checked_compression_type(compression_type)
    target = resolved(path)
    with reading(target, chosen_locks(locks)):
        found = scan(target, kind, progress=True)
        is_counted = _check_count(target, found.size, found.records, found.checksum)
    return RecordReport(target, found.records, found.size, found.compression_type, is_counted)


def repair_tfrecord(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    compression_type: str | None = None,
) -> RepairReport:
    """Write the good records of a damaged file to a new one; the old one stays as it is.

    After a damaged record the next good one is looked for. In a compressed file nothing can be
    found after the damage. A file that was made to keep it busy (thousands of bad records within
    each other) is refused.

    Args:
        path: the damaged file.
        out: the new file, compressed in the same way. It takes its name when it is whole.
        compression_type: of both; None finds out by itself.

    Raises:
        CorruptRecordError: a file of which more would have to be read in vain than damage explains.

    Example::

        report = repair_tfrecord("damaged.tfrecord", "repaired.tfrecord")
        print(report.records, "kept, left out:", report.left_out)
    """
    source, target = resolved(path), absolute(out)
    if source == resolved(out):
        raise ValueError(f"out: expected another file than the damaged one. Received: {out!r}")
    kind = None if compression_type is None else checked_compression_type(compression_type)
    left_out: list[tuple[int, int]] = []
    with ExitStack() as stack:
        file = stack.enter_context(opened(source))
        kind = compression_of(file) if kind is None else kind
        size = os.fstat(file.fileno()).st_size
        progress = stack.enter_context(Progress(f"Repairing {source.name}", size))
        writer = stack.enter_context(
            RecordFileWriter(target, compression_type=kind, closed_like=[source])
        )
        done = 0
        for offset, record in _good_records(file, kind, _Effort(source, size), left_out):
            writer.write(record)
            progress.advance(offset - done)
            done = offset
    return RepairReport(target, writer.records, tuple(left_out))


def split_tfrecord(
    path: str | os.PathLike[str],
    prefix: str | os.PathLike[str],
    num_shards: int,
    *,
    compression_type: str | None = None,
    locks: Locks | None = None,
) -> list[Path]:
    """Cut one file into shards for workers: record ``i`` goes to shard ``i % num_shards``.

    Nothing is published unless all of the file is sound.

    Args:
        path: the file.
        prefix: as for `TFRecordShardWriter`.
        num_shards: how many there will be. Each takes some megabytes of memory.
        compression_type: of the file and of the shards; None finds out by itself.
        locks: a `LockManager` or `RedisLocks`.

    Returns:
        The paths of the shards.

    Example::

        shards = split_tfrecord("episodes.tfrecord", "data/train", num_shards=8)
    """
    source = resolved(path)
    kind = None if compression_type is None else checked_compression_type(compression_type)
    shard_path(prefix, 0, num_shards)  # An error in the arguments comes before any work.
    shards = [absolute(shard_path(prefix, shard, num_shards)) for shard in range(num_shards)]
    if source in shards:
        raise ValueError(f"prefix: expected other names than that of {path!r}.")
    locks = chosen_locks(locks)
    with ExitStack() as stack:
        stack.enter_context(reading_only(source))
        stack.enter_context(reading(source, locks))
        file = stack.enter_context(opened(source))
        kind = compression_of(file) if kind is None else kind
        size = os.fstat(file.fileno()).st_size
        progress = stack.enter_context(Progress(f"Splitting {source.name}", size))
        # Swept once: each looks at all temporary files, and there are as many as shards.
        writers = [
            stack.enter_context(
                RecordFileWriter(
                    path,
                    compression_type=kind,
                    locks=locks,
                    sweeps=not shard,
                    closed_like=[source],
                )
            )
            for shard, path in enumerate(shards)
        ]
        number = done = 0
        try:
            for offset, record in records_in(file, kind):
                writers[number % num_shards].write(record)
                number += 1
                progress.advance(offset - done)
                done = offset
        except BadRecordError as bad:
            raise bad_record(source, bad, kind) from None
        _check_count(source, size, number, None)
        # All of them are on the disk before the first one is seen: a full disk leaves no mixture.
        for writer in writers:
            writer.finish()
    return [writer.path for writer in writers]


def _check_count(path: Path, size: int, records: int, checksum: int | None) -> bool:
    """Against what is noted beside the file; False if nothing is."""
    contents = noted(path)
    counts = [content for content in contents if content.records is not None]
    if not counts:
        return False
    same_size = [content for content in contents if content.size == size]
    if any(
        content.records in (None, records)
        and (checksum is None or content.checksum in (None, checksum))
        for content in same_size
    ):
        return all(content.records is not None for content in same_size)
    wanted = counts[-1]
    if wanted.records == records and same_size:
        raise CorruptRecordError(
            path, 0, 0, "its records are sound, but they are not those that were written"
        )
    raise CorruptRecordError(
        path,
        min(records, wanted.records or 0),
        size,
        f"it has {records:,} records in {size:,} bytes, and {wanted.records:,} in "
        f"{wanted.size:,} were written",
    )


def _good_records(
    file: IO[bytes], compression_type: str, effort: _Effort, left_out: list[tuple[int, int]]
) -> Iterator[tuple[int, bytes]]:
    """Each good record and where it is; the ranges in between go to ``left_out``."""
    start: int | None = 0
    while start is not None:
        file.seek(start)
        try:
            for offset, record in records_in(file, compression_type):
                yield start + offset, record
            return
        except BadRecordError as bad:
            begin = start + bad.offset
            if compression_type:
                left_out.append((begin, -1))
                return
            effort.spend(file, begin)
            start = _next_record(file, begin, effort)
            left_out.append((begin, effort.size if start is None else start))


class _Effort:
    """What is read of a damaged file in vain, which has an end also if somebody made the damage."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self.size = size
        self._left = _MOST_READINGS * size + _SPARE_BYTES

    def is_record_at(self, file: IO[bytes], offset: int) -> bool:
        """Whether a whole record begins there."""
        length = length_at(file, offset)
        if length is None or offset + 16 + length > self.size:
            return False
        if is_record_at(file, offset):
            return True
        self.spend(file, offset)
        return False

    def spend(self, file: IO[bytes], offset: int) -> None:
        """The record there is bad, and was read to find that out."""
        self._left -= min(length_at(file, offset) or 0, self.size - offset)
        if self._left < 0:
            raise CorruptRecordError(
                self._path,
                0,
                offset,
                f"more than {_MOST_READINGS} times its {self.size:,} bytes were read in search of "
                "good records, which no damage explains: it was made so",
            )


def _next_record(file: IO[bytes], bad: int, effort: _Effort) -> int | None:
    """Where the first good record after a bad one begins."""
    size = effort.size
    # If its length can be trusted: what looks like a record within a record is none.
    while (length := length_at(file, bad)) is not None:
        after = bad + 16 + length
        if after == size:
            return None
        if effort.is_record_at(file, after):
            return after
        if after > size or length_at(file, after) is None:
            break  # Bytes may be missing in between: look at each place.
        bad = after  # A damaged one again, whose length can be trusted, too.
    start, step = bad + 1, _FIRST_SEARCH_BYTES
    while start < size:
        file.seek(start)
        for candidate in _candidates(file.read(step + 11)):
            if effort.is_record_at(file, start + candidate):
                return start + candidate
        start += step
        # The next good record is mostly near, and there may be a million places to search from.
        step = min(2 * step, _SEARCH_BYTES)
    return None


def _candidates(data: bytes) -> list[int]:
    """Where four bytes of zero can be the upper half of a length, with a checksum behind."""
    if len(data) < 12:
        return []
    array = np.frombuffer(data, np.uint8)
    count = len(array) - 11
    upper = np.ones(count, bool)
    for place in range(4, 8):
        upper &= array[place : place + count] == 0
    has_checksum = np.zeros(count, bool)
    for place in range(8, 12):
        has_checksum |= array[place : place + count] != 0
    return np.flatnonzero(upper & has_checksum).tolist()  # type: ignore[no-any-return]
