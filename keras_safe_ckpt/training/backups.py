"""The checkpoints of one run: what it was at a batch, to go on from there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
from keras_safe_ckpt.storage.paths import refuse_linked_directory
from keras_safe_ckpt.storage.restore import load_opened, none_is_whole
from keras_safe_ckpt.storage.retention import Checkpoint, KeepAny, KeepNewest
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


@dataclass(frozen=True)
class _KeepNewestOfAll:
    """The newest that was saved with the parts of all workers: the run is exact from there only."""

    def keep(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        return [c for c in checkpoints if not _document_of(c.manifest).get("degraded")][-1:]


@dataclass(frozen=True)
class _KeepSaves:
    """The parts of these saves, however many came after them that nobody has completed."""

    saves: frozenset[object]

    def keep(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        return [c for c in checkpoints if _document_of(c.manifest).get("save") in self.saves]


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
        # Two saves may be of one step: the one without all workers must not replace the other.
        name = f"{PREFIX}{step:010d}" + ("-degraded" if document.get("degraded") else "")
        retention = KeepAny((KeepNewest(self._keep), _KeepNewestOfAll()))
        store = self.store
        if worker is not None:
            store = self._part_store(worker)
            name += f"-{document['save']}"
            # A part is written before the checkpoint to which it belongs, which may never come.
            saves = frozenset(_document_of(c.manifest).get("save") for c in self._all())
            retention = KeepAny((KeepNewest(self._keep + 1), _KeepSaves(saves)))
        return store.publish(
            snapshot,
            step=step,
            epoch=epoch,
            batch=batch or None,
            metrics=metrics,
            extra={_KEY: {**document, "version": _FORMAT_VERSION}},
            extra_arrays=arrays,
            name=f"{name}.weights.h5",
            series=SERIES,
            retention=retention,
        )

    def newest(self, workers: int = 1, *, else_degraded: bool = True) -> Backup | None:
        """The newest one that is whole, None if there is none at all.

        One that has the parts of all ``workers`` comes before a newer one that has not: from there
        the run ends as if nothing had happened. Not ``else_degraded``: nor does it go on from one
        that was saved without them before there was any; from the beginning it is exact as well.
        `CorruptCheckpointError` that names all of them if there are some, and none is whole.
        """
        skipped: list[str] = []
        incomplete: list[Backup] = []

        def report(path: Path, reason: str) -> None:
            if path.name.startswith(PREFIX):
                skipped.append(f"{path.name}: {reason}")
                self.store.events.report_skip(path, reason)

        for found in reversed(self._all(report)):
            backup = _opened(found.path, report)
            if backup is None:
                continue
            if not self.missing_parts(backup, workers):
                for passed in incomplete:
                    report(passed.path, "it has not the parts of all workers, an older one has")
                    passed.close()
                return backup
            incomplete.append(backup)
        # A part that was damaged later is another thing: from there much may have been trained.
        never_complete = not skipped and all(b.document.get("degraded") for b in incomplete)
        if incomplete and never_complete and not else_degraded:
            for passed in incomplete:
                report(passed.path, "it has not the parts of all workers: the run begins anew")
                passed.close()
            return None
        for passed in incomplete[1:]:
            passed.close()
        if incomplete:
            return incomplete[0]
        if skipped:
            raise none_is_whole(self.directory, skipped)
        return None

    def holds(self, save: str) -> bool:
        """Whether the save of this name is there and whole, with or without all its parts."""
        report = self.store.events.report_skip
        for found in reversed(self._all()):
            if _document_of(found.manifest).get("save") == save:
                backup = _opened(found.path, report)
                if backup is not None:
                    backup.close()
                    return True
        return False

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
            if _document_of(found.manifest).get("save") == save:
                return _opened(found.path, store.events.report_skip)
        return None

    def missing_parts(self, backup: Backup, workers: int) -> list[int]:
        """Which of so many workers were there when it was saved, and have no whole part in it.

        Who has written it has none: its part is the checkpoint itself. That is the chief, number
        0, unless it was gone: another one saves in its place then, and the chief's is missing.
        """
        then = backup.document.get("workers")
        there = min(workers, then) if isinstance(then, int) else workers
        writer = backup.document.get("writer", 0)
        missing = []
        for worker in range(there):
            if worker == writer:
                continue
            # Looked for, whatever the checkpoint says: one that came too late is as good.
            part = self.part(worker, str(backup.document.get("save")))
            if part is None:
                missing.append(worker)
            else:
                part.close()
        return missing

    def delete_all(self, workers: int) -> None:
        """Of a run that is finished: nobody is to go on from them."""
        for worker in range(workers):
            if self._part_folder(worker).is_dir():
                self._part_store(worker).delete_series(SERIES)
        self.store.delete_series(SERIES)

    def has_any(self) -> bool:
        """Whether there is one to go on from, as far as can be told now."""
        try:
            return bool(self._all())
        except UnreadableCheckpointError:
            return False

    def _all(self, report: Any = None) -> list[Checkpoint]:
        """Those of the run, oldest first."""
        return [c for c in self.store.checkpoints(report) if c.manifest.series == SERIES]

    def _part_folder(self, worker: int) -> Path:
        return self.directory / f"worker-{worker}"

    def _part_store(self, worker: int) -> CheckpointStore:
        if worker not in self._parts:
            folder = self._part_folder(worker)
            refuse_linked_directory(folder)
            self._parts[worker] = CheckpointStore(
                folder, locks=self.store.locks, worker=f"worker-{worker}"
            )
        return self._parts[worker]


def _document_of(manifest: Manifest) -> Mapping[str, Any]:
    document = manifest.extra.get(_KEY)
    return document if isinstance(document, dict) else {}


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
