"""Append to a TFRecord file under its lock, so that all of it is there or nothing."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from keras_safe_ckpt.datasets.record_count import Content, is_append, note, note_at_last, noted
from keras_safe_ckpt.datasets.record_format import Encoder
from keras_safe_ckpt.datasets.scanning import ensure_compression, scan
from keras_safe_ckpt.errors import CorruptCheckpointError
from keras_safe_ckpt.storage.atomic import sync_file
from keras_safe_ckpt.storage.block_writer import write_all
from keras_safe_ckpt.storage.checksum import checksum_of, extended
from keras_safe_ckpt.storage.lock_backend import HeldLock, Locks
from keras_safe_ckpt.storage.paths import let_go, refuse_unsafe_target, sync_directory
from keras_safe_ckpt.storage.translation import writing

_log = logging.getLogger(__name__)

_BLOCK_BYTES = 8 << 20


@dataclass
class Group:
    """Records that go to a file together. ``is_appended`` is true from the very moment on."""

    encoder: Encoder
    is_appended: bool = False
    #: What the file was to be when an append failed that could not be undone.
    in_doubt: Content | None = None


def append_durably(path: Path, group: Group, compression_type: str, locks: Locks) -> None:
    """All of ``group`` at the end of the file, or `CheckpointWriteError` and nothing of it."""
    data = group.encoder.whole()
    with locks.exclusive(path) as held, writing(path):
        refuse_unsafe_target(path)
        if group.is_appended:
            return
        current = settle(path, compression_type, held)
        if group.in_doubt is not None and current == group.in_doubt:
            group.is_appended = True
            return
        assert current.records is not None
        assert current.checksum is not None
        longer = Content(
            current.size + len(data),
            current.records + group.encoder.waiting_records,
            extended(current.checksum, data),
            checksum_of(data),
        )
        note(path, [current, longer], held)
        held.ensure_held()
        try:
            group.in_doubt = longer
            _put(path, data, current.size)
            group.is_appended = True
        finally:
            # Ctrl-C, too: whoever tries again would append it twice.
            if not group.is_appended and path.exists():
                held.ensure_held()
                _cut(path, current.size)
                group.in_doubt = None
        # From now on a file that is shorter is damaged, rather than an append that did not end.
        note_at_last(path, longer, held)


def settle(path: Path, compression_type: str, held: HeldLock) -> Content:
    """Under the exclusive lock: put the file right, and say what is in it."""
    put_right(path, held)
    contents = noted(path)
    if not path.exists():
        if contents and contents[0].size:
            _log.warning("%s: it was deleted, and begins anew", path)
        return Content(0, 0, 0)
    size = path.stat().st_size
    if size:
        ensure_compression(path, compression_type)
    found = [content for content in contents if content.size == size]
    if len(found) == 1:
        return _counted(path, found[0], compression_type)
    if not found and contents and size < contents[-1].size:
        raise CorruptCheckpointError(
            path,
            f"it has {size:,} bytes, and {contents[-1].size:,} were written; see verify_tfrecord "
            "and repair_tfrecord",
        )
    # Nobody has counted what is there: it was written without this library. (Or a writer was
    # killed when it replaced a file by another one of the same size.)
    return _counted(path, Content(size), compression_type)


def put_right(path: Path, held: HeldLock) -> None:
    """Under the exclusive lock: cut off what a killed process has left of an append."""
    contents = noted(path)
    if not is_append(contents) or not path.exists():
        return
    before, after = contents[0], contents[-1]
    size = path.stat().st_size
    if size == after.size and _has_tail(path, contents):
        sync_file(path)  # Who wrote it was killed, perhaps before that.
        note_at_last(path, after, held)
        return
    if not before.size <= size <= after.size:
        return  # Somebody else has written to it.
    if before.checksum not in (None, _checksum(path, before.size)):
        raise CorruptCheckpointError(path, "it is not the file that was appended to")
    if size > before.size:
        _log.warning("%s: an append was interrupted and is undone", path)
        held.ensure_held()
        _cut(path, before.size)
    note_at_last(path, before, held)


def is_settled(path: Path) -> bool:
    """Whether a reader finds what was written, and nothing half-way."""
    contents = noted(path)
    if not is_append(contents) or not path.exists():
        return True
    size = path.stat().st_size
    if size == contents[-1].size:
        return _has_tail(path, contents)
    return not contents[0].size < size < contents[-1].size


def _counted(path: Path, content: Content, compression_type: str) -> Content:
    if content.records is not None and content.checksum is not None:
        return content
    if content.size == 0:
        return Content(0, 0, 0)
    found = scan(path, compression_type)
    return Content(content.size, found.records, found.checksum)


def _has_tail(path: Path, contents: list[Content]) -> bool:
    """Whether what was appended last has reached the file, also if the power was cut then."""
    with open(path, "rb") as file:
        file.seek(contents[0].size)
        tail = file.read(contents[-1].size - contents[0].size)
    return bool(checksum_of(tail) == contents[-1].tail_checksum)


def _checksum(path: Path, size: int) -> int:
    """Of the beginning of a file."""
    crc = 0
    with open(path, "rb") as file:
        while size and (data := file.read(min(size, _BLOCK_BYTES))):
            crc = extended(crc, data)
            size -= len(data)
    return crc


def _put(path: Path, data: bytes, offset: int) -> None:
    is_new = not path.exists()
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        write_all(descriptor, data, offset)
        os.fsync(descriptor)
    finally:
        let_go(descriptor)
    if is_new:
        sync_directory(path.parent)


def _cut(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        let_go(descriptor)
