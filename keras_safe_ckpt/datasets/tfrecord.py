"""TFRecord files that are written by many: `TFRecordShardWriter`, `LockedTFRecordWriter`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from keras_safe_ckpt.datasets.appending import Group, append_durably
from keras_safe_ckpt.datasets.record_count import (
    Content,
    matching,
    note,
    note_at_last,
    note_of,
)
from keras_safe_ckpt.datasets.record_format import (
    Encoder,
    checked_compression_type,
    checked_record,
)
from keras_safe_ckpt.datasets.shards import shard_path
from keras_safe_ckpt.datasets.turns import Turn
from keras_safe_ckpt.errors import CheckpointWriteError, CorruptCheckpointError
from keras_safe_ckpt.storage.atomic import StagedFile, sweep_orphans
from keras_safe_ckpt.storage.checksum import extended
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.locks import chosen_locks
from keras_safe_ckpt.storage.paths import (
    absolute,
    make_directory,
    refuse_long_name,
    refuse_unsafe_target,
)
from keras_safe_ckpt.storage.translation import writing

#: So much is collected before it goes to the file.
_BLOCK_BYTES = 1 << 20

_Writer = TypeVar("_Writer", bound="_RecordWriter")


class _RecordWriter:
    """What both writers share: records come from any thread of one process, until `close`."""

    def __init__(self, path: Path, compression_type: str | None, level: int) -> None:
        refuse_long_name(path, note_of(path))
        self.path = path
        self._compression_type = checked_compression_type(compression_type)
        if isinstance(level, bool) or not isinstance(level, int) or not -1 <= level <= 9:
            raise ValueError(
                f"compression_level: expected a whole number from -1 to 9. Received: {level!r}"
            )
        self._level = level
        self._turn = Turn(path)
        self._is_open = True

    def write(self, record: Any) -> None:
        """Add a ``record``: bytes, or a message such as ``tf.train.Example``."""
        data = checked_record(record)
        with self._turn.taken():
            self._check_open()
            self._add(data)

    def close(self) -> None:
        raise NotImplementedError

    def _add(self, data: bytes) -> None:
        raise NotImplementedError

    def _give_up(self) -> None:
        raise NotImplementedError

    def __enter__(self: _Writer) -> _Writer:
        return self

    def _new_encoder(self) -> Encoder:
        return Encoder(self._compression_type, self._level)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._give_up()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError(f"The writer of {str(self.path)!r} is closed.")


class RecordFileWriter(_RecordWriter):
    """Writes one file that others see when it is whole, and its count."""

    def __init__(
        self,
        path: Path,
        *,
        compression_type: str | None = "",
        compression_level: int = -1,
        locks: Locks | None = None,
        sweeps: bool = True,
        closed_like: Sequence[Path] = (),
    ) -> None:
        super().__init__(path, compression_type, compression_level)
        self._locks = chosen_locks(locks)
        self._sweeps = sweeps
        self._encoder = self._new_encoder()
        #: How many were written by now.
        self.records = 0
        self._checksum = 0
        self._is_finished = False
        self._failure: BaseException | None = None
        self._staged = StagedFile(path, closed_like=closed_like)

    def close(self) -> None:
        """The file is whole: publish it. Nothing happens if that was done before."""
        with self._turn.taken():
            self._finish()
            if not self._is_open:
                return
            content = Content(self._staged.size, self.records, self._checksum)
            with (
                self._kept_whole(),
                writing(self.path),
                self._locks.exclusive(self.path) as held,
            ):
                if self._sweeps:
                    sweep_orphans(self.path.parent)
                # Also after a crash in between one of the two is what the file is.
                note(self.path, [*self._former(), content], held)
                held.ensure_held()
                self._staged.commit()
                note_at_last(self.path, content, held)
            self._is_open = False
            self._staged.rollback()

    def finish(self) -> None:
        """Everything is on the disk, and nobody sees it yet: for files that belong together."""
        with self._turn.taken():
            self._finish()

    def _finish(self) -> None:
        if self._failure is not None:
            raise CheckpointWriteError(
                self.path, f"an earlier write did not come to its end ({self._failure!r})"
            )
        if self._is_open and not self._is_finished:
            with self._kept_whole():
                self._spill(end=True)
                self._staged.sync()
                self._is_finished = True

    def _former(self) -> list[Content]:
        """What is there now, and what is known of it."""
        if not self.path.exists():
            return []
        size = self.path.stat().st_size
        with contextlib.suppress(CorruptCheckpointError):
            known = matching(self.path, size)
            if known is not None:
                return [dataclasses.replace(known, tail_checksum=None)]
        return [Content(size)]

    def _add(self, data: bytes) -> None:
        with self._kept_whole():
            self._encoder.add(data)
            self.records += 1
            if self._encoder.waiting_bytes >= _BLOCK_BYTES:
                self._spill()

    def _spill(self, *, end: bool = False) -> None:
        data = self._encoder.take(end=end)
        if data:
            self._checksum = extended(self._checksum, data)
            self._staged.write(data)

    @contextlib.contextmanager
    def _kept_whole(self) -> Iterator[None]:
        """Half a write, by an error or Ctrl-C, is never published, even if somebody goes on."""
        try:
            yield
        except BaseException as error:
            self._roll_back()
            self._failure = error
            raise

    def _give_up(self) -> None:
        if not self._turn.is_of_parent:
            with self._turn.taken():
                self._roll_back()

    def _roll_back(self) -> None:
        if self._is_open:
            self._is_open = False
            self._staged.rollback()


class TFRecordShardWriter(RecordFileWriter):
    """Writes ``PREFIX-00003-of-00008.tfrecord``, which others see when it is whole.

    Args:
        prefix: the path of all shards up to their numbers.
        shard: the number of this one, from 0.
        num_shards: how many there are.
        compression_type: "", "GZIP" or "ZLIB", as TensorFlow has it.
        compression_level: of zlib; -1 is its default.
        locks: a `LockManager` or `RedisLocks`, for the moment of publishing.

    How many records there are is kept beside the file, with a checksum, so that `verify_tfrecord`
    and `locked_tfrecord_dataset` notice if it was cut off. What was there before under this name
    stays until `close`; if the block ends by an error, it stays for good.

    Example::

        with TFRecordShardWriter("data/train", shard=3, num_shards=8) as writer:
            for record in records:
                writer.write(record)  # bytes, or a tf.train.Example
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        shard: int,
        num_shards: int,
        *,
        compression_type: str | None = "",
        compression_level: int = -1,
        locks: Locks | None = None,
    ) -> None:
        super().__init__(
            absolute(shard_path(prefix, shard, num_shards)),
            compression_type=compression_type,
            compression_level=compression_level,
            locks=locks,
        )


class LockedTFRecordWriter(_RecordWriter):
    """Appends to one file in turn with any number of other processes.

    Args:
        path: the file; it is made if it is not there.
        compression_type: "" or "GZIP"; that of all who write to it. (Of several streams of "ZLIB"
            in one file TensorFlow reads the first, and takes it for all.)
        compression_level: of zlib; -1 is its default.
        locks: a `LockManager` or `RedisLocks`.

    Records are collected and appended together, under the lock: by `flush`, by `close`, and when
    there is a megabyte of them. If that fails they are kept for the next `flush`. Such a group is
    in the file whole, one record after another, or not at all, whatever interrupts; what a killed
    process has left half-way is cut off by whoever comes next. How many records there are is kept
    beside the file.

    Read it with `locked_tfrecord_dataset`, which waits for the moment in which nobody appends.

    Example::

        with LockedTFRecordWriter("episodes.tfrecord") as writer:
            for record in records:
                writer.write(record)
            writer.flush()  # all of them are in the file
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        compression_type: str | None = "",
        compression_level: int = -1,
        locks: Locks | None = None,
    ) -> None:
        super().__init__(absolute(path), compression_type, compression_level)
        if self._compression_type == "ZLIB":
            raise ValueError(
                "compression_type: expected '' or 'GZIP'. Received: 'ZLIB', of which TensorFlow "
                "reads only what was appended first, without an error"
            )
        refuse_unsafe_target(self.path)
        make_directory(self.path.parent)
        self._locks = chosen_locks(locks)
        self._locks.check(self.path.parent)
        sweep_orphans(self.path.parent)
        #: What could not be appended yet; the last one takes what comes.
        self._groups = [Group(self._new_encoder())]

    def flush(self) -> None:
        """What was written by now is in the file, durable. After an error, call it again."""
        with self._turn.taken():
            self._check_open()
            self._append_groups()

    def _append_groups(self) -> None:
        if self._groups[-1].encoder.waiting_records:
            # A group of its own: a compressed stream cannot be gone on with later.
            self._groups.append(Group(self._new_encoder()))
        while len(self._groups) > 1:
            if not self._groups[0].is_appended:
                append_durably(self.path, self._groups[0], self._compression_type, self._locks)
            del self._groups[0]

    def close(self) -> None:
        """Append what waits. Nothing happens if that was done before."""
        with self._turn.taken():
            if self._is_open:
                self._append_groups()
                self._is_open = False

    def _add(self, data: bytes) -> None:
        self._groups[-1].encoder.add(data)
        if self._groups[-1].encoder.waiting_bytes >= _BLOCK_BYTES:
            self._append_groups()

    def _give_up(self) -> None:
        # What was written before the error is as good as without it.
        if not self._turn.is_of_parent:
            self.close()
