"""Delete what a retention policy does not keep, and never the last whole checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from keras_safe_ckpt.errors import CheckpointWriteError
from keras_safe_ckpt.storage.catalog import Catalog
from keras_safe_ckpt.storage.events import EventLog
from keras_safe_ckpt.storage.lock_backend import HeldLock
from keras_safe_ckpt.storage.path_template import without_aside
from keras_safe_ckpt.storage.paths import sync_directory
from keras_safe_ckpt.storage.retention import Checkpoint, Retention

_log = logging.getLogger(__name__)


class Pruner:
    """Prunes the directory of a catalog, one series of one worker at a time, under its lock."""

    def __init__(self, catalog: Catalog, events: EventLog) -> None:
        self._catalog = catalog
        self._events = events

    def plan(self, policy: Retention) -> list[tuple[Checkpoint, bool]]:
        """What `prune_each_series` would do now: each checkpoint, and whether it would go."""
        planned = []
        for present in self._series():
            kept = {checkpoint.path for checkpoint in policy.keep(present)}
            planned += [(checkpoint, checkpoint.path not in kept) for checkpoint in present]
        return planned

    def prune_each_series(self, policy: Retention, lock: HeldLock) -> list[Path]:
        """Apply ``policy`` to every series by itself; return what was deleted."""
        deleted = []
        for present in self._series():
            deleted += self._delete(present, policy.keep(present), lock)
        return deleted

    def prune_around(self, published: Checkpoint, policy: Retention, lock: HeldLock) -> None:
        """Apply ``policy`` to the series of ``published``, which stays in any case."""
        series = [
            checkpoint
            for checkpoint in self._ours()
            if _series_of(checkpoint) == _series_of(published)
        ]
        try:
            self._delete(series, [*policy.keep(series), published], lock)
        except CheckpointWriteError as error:
            # The save itself succeeded, and the next one will try again.
            _log.warning("Could not prune: %s", error)
            self._events.record("error", error=str(error), kind=type(error).__name__)

    def delete_series(self, name: str, lock: HeldLock) -> list[Path]:
        """Delete all of a series, oldest first, since nobody needs it any more."""
        doomed = [c.path for c in self._ours() if c.manifest.series == name]
        return self._unlink(doomed, lock) if doomed else []

    def _series(self) -> list[list[Checkpoint]]:
        series: dict[tuple[str, str | None], list[Checkpoint]] = {}
        for checkpoint in self._ours():
            series.setdefault(_series_of(checkpoint), []).append(checkpoint)
        return list(series.values())

    def _ours(self) -> list[Checkpoint]:
        """Those that still have the name under which they were published, or were set aside."""
        return [
            checkpoint
            for checkpoint in self._catalog.checkpoints()
            if checkpoint.manifest.name
            in (checkpoint.path.name, without_aside(checkpoint.path.name))
        ]

    def _delete(
        self, present: Sequence[Checkpoint], staying: Sequence[Checkpoint], lock: HeldLock
    ) -> list[Path]:
        kept = {checkpoint.path for checkpoint in staying}
        doomed = [checkpoint.path for checkpoint in present if checkpoint.path not in kept]
        if not doomed or not self._catalog.any_whole(sorted(kept), self._events.report_skip):
            return []
        return self._unlink(doomed, lock)

    def _unlink(self, doomed: Sequence[Path], lock: HeldLock) -> list[Path]:
        lock.ensure_held()
        deleted, failure = [], None
        for path in doomed:
            if not self._catalog.is_as_known(path):
                continue  # Published anew meanwhile, by somebody who does not know our lock.
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                failure = CheckpointWriteError(path, error)
            else:
                deleted.append(path)
                self._catalog.forget(path)
        try:
            sync_directory(self._catalog.directory)
        except OSError as error:
            failure = CheckpointWriteError(self._catalog.directory, error)
        self._events.record("prune", files=[path.name for path in deleted])
        if failure is not None:
            raise failure
        return deleted


def _series_of(checkpoint: Checkpoint) -> tuple[str, str | None]:
    return checkpoint.manifest.series, checkpoint.manifest.worker
