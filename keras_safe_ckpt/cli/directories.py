"""Which directories hold checkpoints, below one that was asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from keras_safe_ckpt.errors import CheckpointNotFoundError, UnsafePathError
from keras_safe_ckpt.storage.survey import find_checkpoints


def existing_directory(path: Path) -> Path:
    """The same path; an error that says what is there instead."""
    if path.is_dir():
        return path
    if os.path.lexists(path):
        raise UnsafePathError(path, "it is not a directory, and one was expected")
    raise CheckpointNotFoundError(path, "there is no such directory", what="directory")


def directories_with_checkpoints(top: Path, *, deep: bool) -> Iterator[tuple[Path, list[Path]]]:
    """``top`` in any case, and those below it that hold checkpoints, with what they hold."""
    existing_directory(top)
    yield top, find_checkpoints(top)
    if not deep:
        return
    for folder, children, _ in os.walk(top):
        # Folders with a leading dot are ours: checkpoints on their way, and what feeds a file.
        children[:] = sorted(name for name in children if not name.startswith("."))
        for name in children:
            try:
                found = find_checkpoints(Path(folder, name))
            except PermissionError:
                continue  # Not ours to look into; what was asked for by name is another matter.
            if found:
                yield Path(folder, name), found
