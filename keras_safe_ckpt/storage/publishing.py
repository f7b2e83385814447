"""The way of a checkpoint: written beside its place, then put there under the lock, or not."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnreadableCheckpointError,
)
from keras_safe_ckpt.storage.atomic import StagedFile, sweep_orphans
from keras_safe_ckpt.storage.catalog import Catalog
from keras_safe_ckpt.storage.events import EventLog, position
from keras_safe_ckpt.storage.formats.format import StorageFormat, read_back
from keras_safe_ckpt.storage.lock_backend import HeldLock, Locks
from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.storage.path_template import aside_name
from keras_safe_ckpt.storage.paths import (
    refuse_unsafe_name,
    refuse_unsafe_target,
    sync_directory,
)
from keras_safe_ckpt.storage.pruning import Pruner
from keras_safe_ckpt.storage.retention import Checkpoint, Retention, SetAside, Veto
from keras_safe_ckpt.storage.room import ensure_room
from keras_safe_ckpt.storage.snapshot import Snapshot

#: The lock of a directory is the file `.keras_safe_ckpt.lock` in it.
LOCK_NAME = "keras_safe_ckpt"


class Publisher:
    """Publishes snapshots in the directory of a catalog, on whichever thread saves."""

    def __init__(
        self,
        format: StorageFormat,
        locks: Locks,
        catalog: Catalog,
        pruner: Pruner,
        events: EventLog,
    ) -> None:
        self._directory = catalog.directory
        self._format = format
        self._locks = locks
        self._catalog = catalog
        self._pruner = pruner
        self._events = events
        self._next_sweep = 0.0
        #: Of the file that was published last; 0 before the first.
        self.last_size = 0
        self._overhead = 0

    def check_target(self, name: str) -> None:
        """Raise if a save under this name could not replace what is there."""
        refuse_unsafe_name(name, self._directory)
        refuse_unsafe_target(self._directory / name)
        self._incumbent(self._directory / name)

    def publish(
        self,
        snapshot: Snapshot,
        draft: Manifest,
        veto: Veto,
        set_aside: SetAside | None,
        retention: Retention | None,
    ) -> Checkpoint | None:
        """Write it as ``draft.name``; None if the veto kept what is in place."""
        began = time.perf_counter()
        target = self._directory / draft.name
        facts = position(draft, draft.name)
        try:
            self._sweep()
            # What the structure of a file takes is known from the last one.
            ensure_room(target, snapshot.nbytes + self._overhead, draft.step)
            draft = replace(draft, sequence=self._next_sequence())
            with StagedFile(target, step=draft.step) as staged:
                manifest = self._format.write(staged, snapshot, draft)
                staged.sync()
                read_back(self._format, staged, manifest)
                # Locked only now, for milliseconds: the bytes are on the disk already.
                with self._locks.exclusive(self._directory / LOCK_NAME) as lock:
                    reason = self._reason_not_to_commit(target, veto, set_aside, manifest, lock)
                    if reason is not None:
                        self._events.record("skip", reason=reason, **facts)
                        return None
                    staged.commit()
                    self._catalog.remember(target, manifest)
                    size = self.last_size = staged.size
                    self._overhead = max(0, size - snapshot.nbytes)
                    if retention is not None:
                        self._pruner.prune_around(Checkpoint(target, manifest), retention, lock)
        except BaseException as error:
            self._events.record("error", error=str(error), kind=type(error).__name__, **facts)
            raise
        self._events.record(
            "save",
            **facts,
            sequence=manifest.sequence,
            metrics=dict(manifest.metrics),
            bytes=size,
            blocked_seconds=snapshot.seconds,
            seconds=time.perf_counter() - began,
        )
        return Checkpoint(target, manifest)

    def _next_sequence(self) -> int:
        # The clock, so that what cannot be read at the moment counts as well; more than all
        # that can be seen, should the clock have been set back.
        seen = max((c.manifest.sequence for c in self._catalog.checkpoints()), default=0)
        return max(seen + 1, int(time.time() * 1000))

    def _reason_not_to_commit(
        self,
        target: Path,
        veto: Veto,
        set_aside: SetAside | None,
        new: Manifest,
        lock: HeldLock,
    ) -> str | None:
        """Decide by what is in place, which is the same when this returns."""
        while True:
            judged = self._catalog.identity_of(target)
            reason = self._reason_to_keep(target, veto, new)
            if reason is not None:
                return reason
            lock.ensure_held()
            self._keep_aside(target, set_aside, new)
            # Once more, as that may have taken long; and what is in place is compared, for a lock
            # can be lost without notice, by us or by whoever had it before and was paused right
            # before its rename. What is left to such a pause is the rename itself.
            if set_aside is not None:
                lock.ensure_held()
            if self._catalog.identity_of(target) == judged:
                return None

    def _reason_to_keep(self, target: Path, veto: Veto, new: Manifest) -> str | None:
        reason = veto(self._incumbent(target), new)
        if reason is None:
            return None
        try:
            self._catalog.verify(target)
        except (CheckpointNotFoundError, CorruptCheckpointError) as error:
            # However good its manifest says that it is: damaged, it is worth nothing.
            self._events.report_skip(target, str(error))
            return veto(None, new)
        except (IncompatibleCheckpointError, UnreadableCheckpointError) as error:
            # It may be whole, and is the better one: a disk that stumbles must not cost it.
            self._events.report_skip(target, str(error))
        return reason

    def _keep_aside(self, target: Path, set_aside: SetAside | None, new: Manifest) -> None:
        incumbent = None if set_aside is None else self._incumbent(target)
        if incumbent is None or set_aside is None or not set_aside(incumbent, new):
            return
        number = 2
        aside = self._directory / aside_name(target.name, number)
        try:
            while os.path.lexists(aside):
                # Not what a link leads to: it would lead to the new one after the rename.
                if os.path.samestat(os.lstat(target), os.lstat(aside)):
                    return  # By one that was killed, or failed, before it took its place.
                number += 1
                aside = self._directory / aside_name(target.name, number)
            os.link(target, aside)  # Both names, until the rename takes the first one.
            sync_directory(self._directory)
        except OSError as error:
            raise CheckpointWriteError(aside, error) from error
        self._events.record("set_aside", file=target.name, now=aside.name)

    def _incumbent(self, target: Path) -> Manifest | None:
        try:
            return self._catalog.manifest_of(target)
        except (CheckpointNotFoundError, CorruptCheckpointError):
            return None  # Nothing there, or nothing that is worth keeping.
        except (IncompatibleCheckpointError, UnreadableCheckpointError) as error:
            # It may be better than ours, or written by a newer version: hands off.
            raise CheckpointWriteError(
                target, f"what is in place cannot be compared with it: {error}"
            ) from error

    def _sweep(self) -> None:
        """Remove what dead writers left; rarely where looking takes long (a huge directory)."""
        began = time.monotonic()
        if began < self._next_sweep:
            return
        swept = sweep_orphans(self._directory)
        ended = time.monotonic()
        self._next_sweep = ended + 20 * (ended - began)
        if swept:
            self._events.record("sweep", files=swept)
