"""Is there room for one more file?"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from keras_safe_ckpt.errors import CheckpointWriteError


def ensure_room(target: Path, needed_bytes: int, step: int | None = None) -> None:
    """Raise `CheckpointWriteError` with both numbers if ``needed_bytes`` are not free.

    The old file stays until the new one is whole, so its space does not count.
    """
    directory = target.parent
    try:
        while not directory.exists() and directory != directory.parent:
            directory = directory.parent  # It will be made when it is needed.
        usage = shutil.disk_usage(directory)
    except OSError as error:
        raise CheckpointWriteError(target, error, step) from error
    free = usage.free
    if usage.total and free < needed_bytes:  # Some file systems have no size at all.
        cause = OSError(
            errno.ENOSPC,
            f"it needs about {_shown(needed_bytes)}, and {_shown(free)} are free",
        )
        raise CheckpointWriteError(target, cause, step)


def _shown(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count:,} bytes"
