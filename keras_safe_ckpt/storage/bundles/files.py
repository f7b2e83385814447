"""What TensorFlow's checkpoints consist of in a directory: found, placed, doubled and removed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from keras_safe_ckpt.storage.atomic import sync_file
from keras_safe_ckpt.storage.bundles.bundle import part_of
from keras_safe_ckpt.storage.paths import refuse_unsafe_target, sync_directory

INDEX = "index"
_DATA = "data-"


def find_parts(directory: Path, meta_suffix: str | None) -> dict[str, list[str]]:
    """The kinds of files of each checkpoint, by its name; nothing if there is no directory."""
    found: dict[str, list[str]] = {}
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return found
    for file_name in names:
        part = part_of(file_name, meta_suffix)
        if part is not None:
            found.setdefault(part[0], []).append(part[1])
    return found


def is_data(kind: str) -> bool:
    return kind.startswith(_DATA)


def place(directory: Path, name: str, kinds: Sequence[str], source: Path) -> None:
    """Move files of ``source`` to their place; whoever sees the index sees all of it."""
    for kind in _index_last(kinds):
        target = directory / f"{name}.{kind}"
        refuse_unsafe_target(target)
        if kind == INDEX:
            sync_directory(directory)  # Also after a power cut.
        os.replace(source / f"{name}.{kind}", target)
    sync_directory(directory)


def double(source: Path, name: str, kinds: Sequence[str], target: Path) -> None:
    """Let the files of a checkpoint be in ``target`` as well; durable when it returns."""
    for kind in _index_last(kinds):
        one, other = source / f"{name}.{kind}", target / f"{name}.{kind}"
        if kind == INDEX:
            sync_directory(target)
        try:
            os.link(one, other)
        except FileExistsError:
            raise
        except OSError:  # There are file systems without links.
            shutil.copy2(one, other)
            sync_file(other)
    sync_directory(target)


def remove(directory: Path, name: str, kinds: Sequence[str]) -> None:
    """Delete the files of a checkpoint, its index first: it is not one any more at once."""
    for kind in reversed(_index_last(kinds)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(directory / f"{name}.{kind}")


def _index_last(kinds: Sequence[str]) -> list[str]:
    return sorted(kinds, key=lambda kind: kind == INDEX)
