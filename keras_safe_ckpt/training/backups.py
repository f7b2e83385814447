"""The checkpoints of one run: what it was at a batch, to go on from there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnreadableCheckpointError,
)
from keras_safe_ckpt.storage.formats import format_of
from keras_safe_ckpt.storage.formats.format import EXTRA_GROUP, OpenCheckpoint
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.storage.restore import load_opened, none_is_whole
from keras_safe_ckpt.storage.retention import Checkpoint, KeepNewest
from keras_safe_ckpt.storage.snapshot import Snapshot
from keras_safe_ckpt.storage.store import CheckpointStore

#: How the files of a run are called; a directory may hold others, which are left alone.
PREFIX = "run-"
SERIES = f"{PREFIX}*.weights.h5"
#: Where in a manifest the state of the run is.
_KEY = "training"
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Backup:
    """A checkpoint of a run that was found, is open and whole."""

    path: Path
    checkpoint: OpenCheckpoint

    @property
    def manifest(self) -> Manifest:
        return self.checkpoint.manifest

    @property
    def document(self) -> Mapping[str, Any]:
        """What the run wrote about itself, as plain values."""
        document: Mapping[str, Any] = self.manifest.extra[_KEY]
        return document

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays that belong to the document."""
        prefix = f"{EXTRA_GROUP}/"
        return {
            name.removeprefix(prefix): np.array(self.checkpoint.read_array(name))
            for name in self.manifest.arrays
            if name.startswith(prefix)
        }

    def load_into(self, model: Any) -> None:
        """Weights and optimizer; raises before the first one changes if they do not fit."""
        load_opened(model, self.checkpoint, self.path)

    def close(self) -> None:
        self.checkpoint.__exit__(None, None, None)


class Backups:
    """The checkpoints of a run in ``directory``, and those of its workers in folders below."""

    def __init__(
        self, directory: str | os.PathLike[str], *, locks: Locks | None, max_to_keep: int
    ) -> None:
        self.store = CheckpointStore(directory, locks=locks)
        self._keep = max_to_keep
        self._parts: dict[int, CheckpointStore] = {}

    @property
    def directory(self) -> Path:
        return self.store.directory

    def publish(
        self,
        snapshot: Snapshot,
        document: Mapping[str, Any],
        arrays: Mapping[str, Any],
        *,
        step: int,
        epoch: int,
        batch: int,
        metrics: Mapping[str, float],
        worker: int | None = None,
    ) -> Checkpoint | None:
        """Durable when it returns. A ``worker``'s part goes to a folder of its own."""
        store = self.store if worker is None else self._part_store(worker)
        # A part is written before the checkpoint to which it belongs: one more has to stay.
        keep = self._keep if worker is None else self._keep + 1
        return store.publish(
            snapshot,
            step=step,
            epoch=epoch,
            batch=batch or None,
            metrics=metrics,
            extra={_KEY: {**document, "version": _FORMAT_VERSION}},
            extra_arrays=arrays,
            name=f"{PREFIX}{step:010d}.weights.h5",
            series=SERIES,
            retention=KeepNewest(keep),
        )

    def newest(self) -> Backup | None:
        """The newest one that is whole, None if there is none at all.

        `CorruptCheckpointError` that names all of them if there are some, and none is whole.
        """
        skipped: list[str] = []

        def report(path: Path, reason: str) -> None:
            if path.name.startswith(PREFIX):
                skipped.append(f"{path.name}: {reason}")
                self.store.events.report_skip(path, reason)

        for found in reversed(self.store.checkpoints(report)):
            if found.manifest.series == SERIES:
                backup = _opened(found.path, report)
                if backup is not None:
                    return backup
        if skipped:
            raise none_is_whole(self.directory, skipped)
        return None

    def named(self, name: str) -> Backup:
        """The one of this name, which another worker has chosen; raises if it is not whole."""
        return _open(self.directory / name)

    def part(self, worker: int, save: str) -> Backup | None:
        """What a worker has added to the save of this name, if it is there and whole."""
        folder = self._part_folder(worker)
        if not folder.is_dir():
            return None
        store = self._part_store(worker)
        for found in reversed(store.checkpoints(store.events.report_skip)):
            if dict(found.manifest.extra.get(_KEY) or {}).get("save") == save:
                return _opened(found.path, store.events.report_skip)
        return None

    def delete_all(self, workers: int) -> None:
        """Of a run that is finished: nobody is to go on from them."""
        for worker in range(workers):
            if self._part_folder(worker).is_dir():
                self._part_store(worker).delete_series(SERIES)
        self.store.delete_series(SERIES)

    def _part_folder(self, worker: int) -> Path:
        return self.directory / f"worker-{worker}"

    def _part_store(self, worker: int) -> CheckpointStore:
        if worker not in self._parts:
            self._parts[worker] = CheckpointStore(
                self._part_folder(worker), locks=self.store.locks, worker=f"worker-{worker}"
            )
        return self._parts[worker]


def _opened(path: Path, report: Any) -> Backup | None:
    try:
        return _open(path)
    except (
        CheckpointNotFoundError,
        CorruptCheckpointError,
        UnreadableCheckpointError,
    ) as error:
        report(path, str(error))
        return None


def _open(path: Path) -> Backup:
    checkpoint = format_of(path).open(path)
    try:
        checkpoint.verify()
        document = checkpoint.manifest.extra.get(_KEY)
        if not isinstance(document, dict) or not isinstance(document.get("version"), int):
            raise CorruptCheckpointError(path, "it says nothing about the run")
        if document["version"] > _FORMAT_VERSION:
            raise IncompatibleCheckpointError(
                path,
                [
                    f"state of the run: this library reads version {_FORMAT_VERSION}, the file has "
                    f"{document['version']}; upgrade keras_safe_ckpt"
                ],
            )
    except BaseException:
        checkpoint.__exit__(None, None, None)
        raise
    return Backup(path, checkpoint)
