"""What interrupted writers of HDF5 files have left, and how to get at it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from keras_safe_ckpt.datasets.feed_folder import FeedFolder
from keras_safe_ckpt.datasets.spool import streams_in
from keras_safe_ckpt.datasets.worker_files import rows_in, target_of_unfinished
from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LockTimeoutError,
    SafeCheckpointError,
)
from keras_safe_ckpt.storage.atomic import StagedFile
from keras_safe_ckpt.storage.journaled_file import recover
from keras_safe_ckpt.storage.locks import LockManager
from keras_safe_ckpt.storage.paths import absolute

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Unfinished:
    """One file that was not published.

    ``rows`` are those up to the last flush, by dataset. ``holder`` says who writes it, if somebody
    does; then nothing is known of its rows. ``damage`` says why it cannot be read.
    ``has_waiting_rows``: feeders of a `CentralH5Writer` have appended others, which the next one
    takes.
    """

    path: Path
    target: Path
    size: int
    rows: dict[str, int]
    holder: str = ""
    damage: str = ""
    has_waiting_rows: bool = False


def find_unfinished(directory: str | os.PathLike[str]) -> list[Unfinished]:
    """In a directory, by name; what was never flushed is there with no rows."""
    folder = absolute(os.path.join(directory, "-")).parent
    if not folder.is_dir():
        raise CheckpointNotFoundError(folder, "there is no such directory", what="data")
    found = []
    for name in sorted(os.listdir(folder)):
        path = folder / name
        target = target_of_unfinished(path)
        if target is not None and _is_regular(path):
            found.append(_looked_at(path, target))
    return found


def rescue(path: Path, out: str | os.PathLike[str]) -> Path:
    """Copy what can be had of an unfinished file to ``out``; the unfinished one stays."""
    target = target_of_unfinished(path)
    if target is None or not _is_regular(path):
        raise CheckpointNotFoundError(path, "expected an unfinished file", what="data")
    goal = absolute(out)
    with LockManager(timeout=0).exclusive(target):
        if _has_waiting_rows(target):
            raise SafeCheckpointError(
                f"Rows that were appended for {str(target)!r} wait beside it and would be left "
                "out: let a CentralH5Writer of this path take them (make one, and close it)."
            )
        if not _is_recovered(path):
            raise CheckpointNotFoundError(
                path, "its writer was interrupted before its first flush", what="data"
            )
        with open(path, "rb") as source, StagedFile(goal, closed_like=[path]) as staged:
            while data := source.read(_BLOCK_BYTES):
                staged.write(data)
            staged.sync()
            staged.commit()
    return goal


def _looked_at(path: Path, target: Path) -> Unfinished:
    rows: dict[str, int] = {}
    damage = ""
    try:
        with LockManager(timeout=0).exclusive(target):
            if _is_recovered(path):
                rows = rows_in(path)
    except LockTimeoutError as busy:
        return Unfinished(path, target, path.stat().st_size, {}, busy.holder)
    except CorruptCheckpointError as error:
        damage = error.reason
    size, waiting = path.stat().st_size, _has_waiting_rows(target)
    return Unfinished(path, target, size, rows, damage=damage, has_waiting_rows=waiting)


def _has_waiting_rows(target: Path) -> bool:
    """Whether there are streams that nobody has read to the end and removed."""
    folder = FeedFolder(target)
    return not folder.has("drained") and bool(streams_in(folder.path))


def _is_recovered(path: Path) -> bool:
    """Make it a whole file; one that was set aside is one."""
    return path.name.endswith(".interrupted") or recover(path) is not None


def _is_regular(path: Path) -> bool:
    """Not what a link leads to: that was not written here."""
    return path.is_file() and not path.is_symlink()
