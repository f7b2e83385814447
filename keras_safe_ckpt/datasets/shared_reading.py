"""Read a TFRecord file while nobody replaces or changes it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from keras_safe_ckpt.datasets.appending import is_settled, put_right
from keras_safe_ckpt.errors import CheckpointNotFoundError
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.locks import LockManager
from keras_safe_ckpt.storage.paths import absolute


def resolved(path: str | os.PathLike[str]) -> Path:
    """The file itself: its lock and its count are where it is, not where a link to it is."""
    return Path(os.path.realpath(absolute(path)))


@contextlib.contextmanager
def reading(path: Path, locks: Locks) -> Iterator[None]:
    """Under the shared lock, with nothing at its end that a killed process has left half-way.

    Where this process cannot write, no lock file can be made, and the file is read as it is.
    """
    if not path.exists():
        raise CheckpointNotFoundError(path, what="data")  # Without lock files beside nothing.
    if isinstance(locks, LockManager) and not os.access(path.parent, os.W_OK):
        yield
        return
    while True:
        with locks.shared(path):
            if is_settled(path) or not os.access(path, os.W_OK):
                yield
                return
        # Rare, so that readers do not wait for each other.
        with locks.exclusive(path) as held:
            put_right(path, held)
