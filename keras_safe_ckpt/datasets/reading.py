"""Read TFRecord files while others write them: `locked_tfrecord_dataset`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from keras_safe_ckpt.datasets.record_count import matching
from keras_safe_ckpt.datasets.record_format import checked_compression_type
from keras_safe_ckpt.datasets.scanning import ensure_compression
from keras_safe_ckpt.datasets.shards import found_files
from keras_safe_ckpt.datasets.shared_reading import reading
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.locks import chosen_locks

_log = logging.getLogger(__name__)

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def locked_tfrecord_dataset(
    paths: Paths,
    *,
    shard: tuple[int, int] | None = None,
    compression_type: str | None = "",
    num_parallel_reads: int | None = None,
    buffer_size: int | None = None,
    allow_missing_shards: bool = False,
    locks: Locks | None = None,
) -> Any:
    """A ``tf.data.Dataset`` of the records in TFRecord files that others may write meanwhile.

    Each file is under a shared lock from its first record to its last, or until the iterator is
    gone. Before it is read its size is compared with what was written, so that a file that was
    cut off is an error rather than a shorter epoch.

    Args:
        paths: a file, several, or patterns such as ``"data/train-*"``. Of a set of shards
            (``...-of-00008...``) all must be there.
        shard: ``(n, i)``: this reader is number ``i`` of ``n``, which share the files among them;
            with fewer files than readers, the records.
        compression_type: "", "GZIP" or "ZLIB", as TensorFlow has it.
        num_parallel_reads: read so many files at once, taking turns.
        buffer_size: of `tf.data.TFRecordDataset`.
        allow_missing_shards: read what is there of a set of shards.
        locks: a `LockManager` or `RedisLocks`.

    Example::

        dataset = locked_tfrecord_dataset("data/train-*", shard=(2, 0)).batch(32)  # 0 of 2
    """
    import tensorflow as tf

    kind = checked_compression_type(compression_type)
    _check_count("num_parallel_reads", num_parallel_reads, -1)  # tf.data.AUTOTUNE
    _check_count("buffer_size", buffer_size)
    files = found_files(paths, allow_missing_shards=allow_missing_shards)
    locks = chosen_locks(locks)
    for file in files:
        with reading(file, locks):
            ensure_compression(file, kind)
    # By name: the readers may have got their lists in different orders.
    rank_of = {file: rank for rank, file in enumerate(sorted(files))}
    chosen, by_records = _share(files, rank_of, shard)

    def held(names: Iterable[bytes]) -> Iterator[bytes]:
        """Each file, locked until the next one is asked for, or until nobody wants the rest."""
        for name in names:
            path = Path(os.fsdecode(name))
            with reading(path, locks):
                matching(path, path.stat().st_size)
                yield name

    def records_of(names: Any) -> Any:
        # Nothing asks ahead here: a file is read to its end before the generator goes on.
        opened = tf.data.Dataset.from_generator(
            held, args=(names,), output_signature=tf.TensorSpec((), tf.string)
        )
        return tf.data.TFRecordDataset(opened, kind, buffer_size)

    def part_of(name: Any, number: Any) -> Any:
        """The records of this reader in one file; nobody else's count or order matters for that."""
        records = records_of(tf.expand_dims(name, 0))
        if by_records is None:
            return records
        count, index = by_records
        # Not always the same reader has the first record: there may be one in each file.
        return records.shard(count, (index + number) % count)

    names = [os.fsencode(file) for file in chosen]
    if num_parallel_reads is None and by_records is None:
        return records_of(names)
    ranks = tf.constant([rank_of[file] for file in chosen], tf.int64)
    numbered = tf.data.Dataset.from_tensor_slices((names, ranks))
    if num_parallel_reads is None:
        return numbered.flat_map(part_of)
    return numbered.interleave(
        part_of, cycle_length=num_parallel_reads, num_parallel_calls=num_parallel_reads
    )


def _share(
    files: list[Path], rank_of: Mapping[Path, int], shard: tuple[int, int] | None
) -> tuple[list[Path], tuple[int, int] | None]:
    """The files of this reader; or all of them, and how to share the records."""
    if shard is None:
        return files, None
    numbers = list(shard) if isinstance(shard, (tuple, list)) else []
    count, index = numbers if len(numbers) == 2 and all(map(_is_whole, numbers)) else (0, 0)
    if not 0 <= index < count:
        raise ValueError(
            "shard: expected (n, i) with i from 0 to n - 1, as for tf.data.Dataset.shard. "
            f"Received: {shard!r}"
        )
    if count > len(files):
        _log.info("%d files for %d readers: they share the records instead", len(files), count)
        return files, (count, index)
    return [file for file in files if rank_of[file] % count == index], None


def _check_count(name: str, value: object, *others: int) -> None:
    if value is not None and not (_is_whole(value) and (value > 0 or value in others)):  # type: ignore[operator]
        raise ValueError(
            f"{name}: expected a whole number of at least 1, or None. Received: {value!r}"
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
