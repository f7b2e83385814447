"""What is in a directory of checkpoints: found, ordered, verified, remembered."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnreadableCheckpointError,
)
from keras_safe_ckpt.storage.formats import format_of
from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.storage.paths import why_passed_over
from keras_safe_ckpt.storage.retention import Checkpoint

#: What is wrong with a file that is passed over.
NOT_USABLE = (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnreadableCheckpointError,
)

#: Told of each file that was passed over, and why.
OnSkip = Callable[[Path, str], None]

#: What tells one published file from the next one under the same name.
Identity = tuple[int, int, int, int]


class Catalog:
    """The checkpoints of one directory.

    Published files never change, so a manifest is read and a file is verified once for each
    file, however often it is asked for.
    """

    def __init__(self, directory: Path, suffix: str | None = None) -> None:
        self.directory = directory
        # Not every .h5 file is a checkpoint: those are looked at only where they are written.
        self._suffixes = (".keras", ".weights.h5", *([suffix] if suffix else []))
        self._manifests: dict[Path, tuple[Identity, Manifest]] = {}
        self._verified: dict[Path, Identity] = {}

    def checkpoints(self, on_skip: OnSkip | None = None) -> list[Checkpoint]:
        """Every file that carries our manifest, oldest first; the arrays are not verified."""
        found = []
        candidates, others = self._candidates()
        if on_skip is not None:
            for path in others:
                if reason := why_passed_over(path):
                    on_skip(path, reason)
        for path in self._manifests.keys() - set(candidates):
            self.forget(path)  # Deleted, by whomever.
        for path in candidates:
            try:
                found.append(Checkpoint(path, self.manifest_of(path)))
            except CheckpointNotFoundError:
                continue  # Pruned since it was listed.
            except NOT_USABLE as error:
                if on_skip is not None:
                    on_skip(path, str(error))
        return oldest_first(found)

    def latest(self, on_skip: OnSkip) -> Checkpoint | None:
        """The newest one whose digests hold."""
        for checkpoint in reversed(self.checkpoints(on_skip)):
            if self.is_whole(checkpoint.path, on_skip):
                return checkpoint
        return None

    def manifest_of(self, path: Path) -> Manifest:
        """The manifest, which is checked against its own digest only."""
        identity = _identity(path)
        known = self._manifests.get(path)
        if known is None or known[0] != identity:
            with format_of(path).open(path) as checkpoint:
                known = self._manifests[path] = (identity, checkpoint.manifest)
        return known[1]

    def verify(self, path: Path) -> Manifest:
        """Compare every byte with the manifest, unless this very file was compared before."""
        identity = _identity(path)
        if self._verified.get(path) != identity:
            with format_of(path).open(path) as checkpoint:
                checkpoint.verify()
            self._manifests[path] = (identity, checkpoint.manifest)
            self._verified[path] = identity
        return self.manifest_of(path)

    def is_whole(self, path: Path, on_skip: OnSkip) -> bool:
        """Whether `verify` finds nothing; what it finds is reported."""
        try:
            self.verify(path)
        except NOT_USABLE as error:
            on_skip(path, str(error))
            return False
        return True

    def any_whole(self, paths: Sequence[Path], on_skip: OnSkip) -> bool:
        """Whether at least one of them is whole; those that were verified before come first."""
        known = sorted(paths, key=lambda path: path not in self._verified)
        return any(self.is_whole(path, on_skip) for path in known)

    def remember(self, path: Path, manifest: Manifest) -> None:
        """Take note of a file that this process just wrote and synced."""
        try:
            identity = _identity(path)
        except (CheckpointNotFoundError, UnreadableCheckpointError):
            self.forget(path)  # It is looked at when somebody asks for it.
            return
        self._manifests[path] = (identity, manifest)
        self._verified[path] = identity

    def is_as_known(self, path: Path) -> bool:
        """Whether the file is the one whose manifest was read; one that is gone is, too."""
        known = self._manifests.get(path)
        try:
            return known is None or known[0] == _identity(path)
        except CheckpointNotFoundError:
            return True

    def identity_of(self, path: Path) -> Identity | None:
        """What tells this file from any other that was or will be there; None if none is."""
        try:
            return _identity(path)
        except CheckpointNotFoundError:
            return None

    def forget(self, path: Path) -> None:
        """Drop what is known of a file that is gone."""
        self._manifests.pop(path, None)
        self._verified.pop(path, None)

    def _candidates(self) -> tuple[list[Path], list[Path]]:
        """The files, and what has such a name and is none: it is never opened."""
        files: list[Path] = []
        others: list[Path] = []
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    if entry.name.endswith(self._suffixes) and not entry.name.startswith("."):
                        is_file = entry.is_file(follow_symlinks=False)
                        (files if is_file else others).append(self.directory / entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return [], []
        except OSError as error:
            raise UnreadableCheckpointError(self.directory, error) from error
        return files, others


def oldest_first(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """In the order in which they were published."""
    return sorted(
        checkpoints, key=lambda c: (c.manifest.sequence, c.manifest.wall_time, c.path.name)
    )


def _identity(path: Path) -> Identity:
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(path) from error
    except OSError as error:
        raise UnreadableCheckpointError(path, error) from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
