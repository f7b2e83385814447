"""What a TFRecord file should hold, kept beside it in ``.NAME.records``.

A TFRecord file that ends after some record looks whole, wherever that is: only a count that is
kept elsewhere shows what is missing. While a file is replaced or appended to, both what it was and
what it will be are noted, so that at any moment one of them is right.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_safe_ckpt.errors import (
    CheckpointWriteError,
    CorruptCheckpointError,
    LockLostError,
    StaleHolderError,
    UnreadableCheckpointError,
)
from keras_safe_ckpt.storage.atomic import StagedFile
from keras_safe_ckpt.storage.lock_backend import HeldLock

_log = logging.getLogger(__name__)

_VERSION = 1
#: A note of ours is much smaller.
_MOST_NOTE_BYTES = 1 << 16


@dataclass(frozen=True)
class Content:
    """How large a file is, and what its records are; None where that is not known.

    ``checksum`` is that of the whole file; ``tail_checksum`` that of what was appended last,
    which begins where the content before it ends.
    """

    size: int
    records: int | None = None
    checksum: int | None = None
    tail_checksum: int | None = None


def note_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.records")


def noted(path: Path) -> list[Content]:
    """What the file may be: nothing if there is no note, two entries if somebody was at work."""
    note = note_of(path)
    try:
        data = _read(note)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnreadableCheckpointError(note, error) from error
    try:
        found = json.loads(data)
        if found["version"] != _VERSION:
            raise CorruptCheckpointError(
                note, f"expected version {_VERSION}, received {found['version']!r}"
            )
        contents = [Content(**entry) for entry in found["contents"]]
        if not contents or not all(map(_is_sound, contents)) or not _grows(contents):
            raise ValueError("not as it was written")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(
            note, f"it is damaged ({error}); if the records are fine, delete it"
        ) from error
    return contents


def note(path: Path, contents: Sequence[Content], held: HeldLock) -> None:
    """Durable when it returns; `CheckpointWriteError` if that cannot be."""
    entries = [dataclasses.asdict(content) for content in contents]
    data = json.dumps({"version": _VERSION, "contents": entries}).encode()
    try:
        with StagedFile(note_of(path)) as staged:
            staged.write(data + b"\n")
            staged.sync()
            held.ensure_held()  # The note of somebody else may be there by now.
            staged.commit()
    except CheckpointWriteError as error:
        raise CheckpointWriteError(path, f"the count beside it: {error.cause}") from error


def note_at_last(path: Path, content: Content, held: HeldLock) -> None:
    """What it was is past. If that cannot be noted, the note before is right as well."""
    try:
        note(path, [content], held)
    except (CheckpointWriteError, LockLostError, StaleHolderError) as error:
        # Also if the lock is in doubt: what it was held for is done, and cannot be taken back.
        _log.warning("%s: written, but its former size is still noted: %s", path, error)


def is_append(contents: Sequence[Content]) -> bool:
    """Whether the note is of an append on its way, rather than of a new file."""
    return len(contents) > 1 and contents[-1].tail_checksum is not None


def matching(path: Path, size: int) -> Content | None:
    """What is noted for the file of this size; None if nothing is noted at all."""
    contents = noted(path)
    for content in reversed(contents):
        if content.size == size:
            return content
    if contents:
        sizes = " or ".join(f"{content.size:,}" for content in contents)
        raise CorruptCheckpointError(path, f"it has {size:,} bytes, and {sizes} were written")
    return None


def _read(note: Path) -> bytes:
    # A pipe of this name would be waited for, for ever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(note, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CorruptCheckpointError(note, "it is not a regular file; delete it")
        return file.read(_MOST_NOTE_BYTES)


def _grows(contents: Sequence[Content]) -> bool:
    return not is_append(contents) or contents[0].size < contents[-1].size


def _is_sound(content: Content) -> bool:
    def count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62

    others = (content.records, content.checksum, content.tail_checksum)
    return count(content.size) and all(value is None or count(value) for value in others)
