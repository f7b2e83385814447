"""Look at checkpoints one by one, with a bar where it takes long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keras_safe_ckpt.datasets.progress import Progress
from keras_safe_ckpt.errors import CheckpointNotFoundError
from keras_safe_ckpt.storage.survey import Surveyed, look_at, size_of


def look_at_all(paths: Sequence[Path], *, verify: bool) -> list[Surveyed]:
    """All that are still there; verified, it is their bytes that take long, else their number."""
    total = sum(map(size_of, paths)) if verify else len(paths)
    found = []
    title = "Verifying" if verify else "Looking"
    with Progress(f"{title} ({len(paths):,} checkpoints)", total, in_bytes=verify) as progress:
        for path in paths:
            try:
                found.append(look_at(path, verify=verify, advance=progress.advance))
            except CheckpointNotFoundError:
                continue  # A training that prunes has deleted it since it was listed.
            if not verify:
                progress.advance(1)
    return found
