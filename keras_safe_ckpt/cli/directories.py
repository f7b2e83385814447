"""Which directories hold checkpoints, below one that was asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from keras_safe_ckpt.errors import CheckpointNotFoundError, UnsafePathError
from keras_safe_ckpt.storage.survey import find_checkpoints

#: Told of each directory that could not be looked into.
OnClosed = Callable[[Path, OSError], None]


def existing_directory(path: Path) -> Path:
    """The same path; an error that says what is there instead."""
    if path.is_dir():
        return path
    if os.path.lexists(path):
        raise UnsafePathError(path, "it is not a directory, and one was expected")
    raise CheckpointNotFoundError(path, "there is no such directory", what="directory")


def checkpoints_below(top: Path, on_closed: OnClosed) -> Iterator[tuple[Path, list[Path]]]:
    """Each directory below ``top`` with what it holds, which may be nothing."""

    def failed(error: OSError) -> None:
        on_closed(Path(error.filename or top), error)

    for folder, children, _ in os.walk(top, onerror=failed):
        # Folders with a leading dot are ours: checkpoints on their way, and what feeds a file.
        # A link may lead anywhere, to where we have been, too.
        children[:] = sorted(
            name
            for name in children
            if not name.startswith(".") and not os.path.islink(os.path.join(folder, name))
        )
        for name in children:
            try:
                found = find_checkpoints(Path(folder, name))
            except OSError:
                continue  # `os.walk` comes there as well, and tells.
            yield Path(folder, name), found
