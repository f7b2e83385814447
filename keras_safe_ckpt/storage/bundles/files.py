"""What TensorFlow's checkpoints consist of in a directory: found, doubled and removed."""

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


def find_parts(directory: Path, meta_suffix: str) -> dict[str, list[str]]:
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


def place(directory: Path, name: str, kinds: Sequence[str], source: Path) -> None:
    """Move files of ``source`` to their place; whoever sees the index sees all of it."""
    others = [kind for kind in kinds if kind != INDEX]
    for kind in (*others, INDEX):
        target = directory / f"{name}.{kind}"
        refuse_unsafe_target(target)
        if kind == INDEX:
            sync_directory(directory)  # Also after a power cut.
        os.replace(source / f"{name}.{kind}", target)
    sync_directory(directory)


def double(directory: Path, name: str, kinds: Sequence[str], other: str) -> None:
    """Let the checkpoint have two names; whole and durable when it returns."""
    others = [kind for kind in kinds if kind != INDEX]
    for kind in (*others, INDEX):
        source, target = directory / f"{name}.{kind}", directory / f"{other}.{kind}"
        if kind == INDEX:
            sync_directory(directory)
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:  # There are file systems without links.
            shutil.copyfile(source, target)
            sync_file(target)
    sync_directory(directory)


def remove(directory: Path, name: str, kinds: Sequence[str]) -> None:
    """Delete the files of a checkpoint, its index first: it is not one any more at once."""
    for kind in sorted(kinds, key=lambda kind: kind != INDEX):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(directory / f"{name}.{kind}")
