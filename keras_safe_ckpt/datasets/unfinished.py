"""What interrupted writers of HDF5 files have left, and how to get at it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import h5py

from keras_safe_ckpt.datasets.worker_files import target_of_unfinished
from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LockTimeoutError,
)
from keras_safe_ckpt.storage.atomic import StagedFile
from keras_safe_ckpt.storage.journaled_file import recover
from keras_safe_ckpt.storage.locks import LockManager
from keras_safe_ckpt.storage.paths import absolute

_log = logging.getLogger(__name__)

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Unfinished:
    """One file that was not published.

    ``rows`` are those up to the last flush, by dataset. ``holder`` says who writes it, if somebody
    does; then nothing is known of its rows.
    """

    path: Path
    target: Path
    size: int
    rows: dict[str, int]
    holder: str = ""

    @property
    def is_usable(self) -> bool:
        return not self.holder and bool(self.rows)


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
        if not _is_recovered(path):
            raise CheckpointNotFoundError(
                path, "its writer was interrupted before its first flush", what="data"
            )
        with open(path, "rb") as source, StagedFile(goal) as staged:
            while data := source.read(_BLOCK_BYTES):
                staged.write(data)
            staged.sync()
            staged.commit()
    return goal


def _looked_at(path: Path, target: Path) -> Unfinished:
    try:
        with LockManager(timeout=0).exclusive(target):
            rows = _rows(path) if _is_recovered(path) else {}
    except LockTimeoutError as busy:
        return Unfinished(path, target, path.stat().st_size, {}, busy.holder)
    except CorruptCheckpointError as error:
        _log.warning("%s", error)
        rows = {}
    return Unfinished(path, target, path.stat().st_size, rows)


def _is_recovered(path: Path) -> bool:
    """Make it a whole file; one that was set aside is one."""
    return path.name.endswith(".interrupted") or recover(path) is not None


def _rows(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = int(item.shape[0]) if item.shape else 1

    try:
        with h5py.File(path, "r") as file:
            file.visititems(visit)
    except OSError as error:
        raise CorruptCheckpointError(path, f"it is not an HDF5 file ({error})") from error
    return found


def _is_regular(path: Path) -> bool:
    """Not what a link leads to: that was not written here."""
    return path.is_file() and not path.is_symlink()
