"""What the system says, as an error of the tree; what is one already goes through as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keras_safe_ckpt.errors import (
    CheckpointWriteError,
    SafeCheckpointError,
    UnreadableCheckpointError,
)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around everything that is done to write ``path``, looking at what is there included."""
    try:
        yield
    except SafeCheckpointError:
        raise
    except OSError as error:
        raise CheckpointWriteError(path, error) from error


@contextmanager
def reading_only(path: Path) -> Iterator[None]:
    """Around everything that is done to read ``path``."""
    try:
        yield
    except SafeCheckpointError:
        raise
    except OSError as error:
        raise UnreadableCheckpointError(path, error) from error
