"""From a model at a batch boundary to a durable file, in the background, errors included."""

from __future__ import annotations

import logging
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_safe_ckpt.storage.atomic import StagedFile
from keras_safe_ckpt.storage.formats import FORMATS
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.path_template import PathTemplate
from keras_safe_ckpt.storage.paths import absolute
from keras_safe_ckpt.storage.retention import Checkpoint, Retention, Veto, unless_newer
from keras_safe_ckpt.storage.room import ensure_room
from keras_safe_ckpt.storage.shared_capture import shared_capture
from keras_safe_ckpt.storage.snapshot import Snapshot
from keras_safe_ckpt.storage.store import CheckpointStore
from keras_safe_ckpt.storage.writer import BackgroundWriter

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveRequest:
    """What is to be saved and where, as it was decided on the training thread."""

    path: str
    series: str
    step: int
    epoch: int
    batch: int | None
    metrics: Mapping[str, float]
    monitor: str
    mode: str | None
    veto: Veto = unless_newer
    retention: Retention | None = None


#: Called on the thread that saved: with the checkpoint, or None if the one in place was kept.
OnDone = Callable[[Checkpoint | None], None]


class Saver:
    """Saves models one after the other; what fails is raised by the next call, or warned of.

    ``on_error="warn"`` turns every failure into a warning: when it is noticed, and again by
    `finish`.
    """

    def __init__(self, *, background: bool, on_error: str, locks: Locks | None) -> None:
        if on_error not in ("raise", "warn"):
            raise ValueError(
                f"Expected on_error to be 'raise' or 'warn'. Received: on_error={on_error!r}"
            )
        if locks is not None and not callable(getattr(locks, "exclusive", None)):
            raise ValueError(
                f"Expected locks to be a LockManager or RedisLocks. Received: locks={locks!r}"
            )
        self._settings = (background, on_error, locks)
        self._format = "keras"
        self._background = background
        self._tolerant = on_error == "warn"
        self._locks = locks
        self._worker: str | None = None
        self._store: CheckpointStore | None = None
        self._writer = BackgroundWriter()
        self._failures: list[str] = []
        self._unsaid: deque[str] = deque()
        self._last_size = 0

    def open(self, template: PathTemplate, format: str, worker: str | None) -> None:
        """Find out now what a save would find out after hours: rights, locks, room."""
        self._format = format
        self._worker = worker
        self._store = None
        self._last_size = 0
        self._failures.clear()
        if template.parent.fields:
            start = absolute(os.path.join(template.deepest_fixed_directory(), "."))
            StagedFile(start / "probe").rollback()
            return
        store = self._store_in(Path(template.parent.fill({}) or "."))
        if not template.fields:
            store.check_target(template.name.format())
        previous = [c.path for c in store.checkpoints() if c.manifest.series == template.name]
        if previous:
            self._last_size = os.path.getsize(previous[-1])
            with self._tolerated():
                ensure_room(previous[-1], self._last_size)

    def capture(self, model: Any) -> Snapshot:
        """Capture together with all other workers, whoever of them writes."""
        return FORMATS[self._format].capture(model, self._scratch)

    def save(self, source: Any, request: SaveRequest, done: OnDone) -> None:
        """Write a snapshot, or a model as it is now, in the background or at once."""
        with self._tolerated():
            # Before the capture, so that memory never holds two.
            self._writer.wait()
            path = absolute(request.path)
            store = self._store_in(path.parent)
            try:
                ensure_room(path, self._last_size, request.step)
                snapshot = self._snapshot_of(source)
            except Exception as error:
                facts = {"file": path.name, "step": request.step, "epoch": request.epoch}
                store.events.record("error", error=str(error), kind=type(error).__name__, **facts)
                raise

            def job() -> None:
                with self._tolerated():
                    checkpoint = store.publish(
                        snapshot,
                        step=request.step,
                        epoch=request.epoch,
                        batch=request.batch,
                        metrics=request.metrics,
                        monitor=request.monitor,
                        mode=request.mode,
                        name=path.name,
                        series=request.series,
                        veto=request.veto,
                        retention=request.retention,
                    )
                    self._last_size = max(self._last_size, store.last_size)
                    done(checkpoint)

            if self._background:
                self._writer.submit(job)
            else:
                job()

    def poll(self) -> None:
        """Raise or warn of what went wrong since the last call; wait for nothing."""
        self._writer.raise_error()
        while self._unsaid:
            warnings.warn(self._unsaid.popleft(), stacklevel=2)

    def wait(self) -> None:
        """Return when nothing is pending."""
        self._writer.wait()

    @property
    def busy(self) -> bool:
        return self._writer.busy

    def finish(self) -> None:
        """Wait for the last save; raise what it raised, or say again what went wrong."""
        try:
            self._writer.wait()
        finally:
            self._store = None
        self._unsaid.clear()
        if self._failures:
            shown = "\n  ".join(self._failures)
            count = len(self._failures)
            saves = "1 save" if count == 1 else f"{count} saves"
            warnings.warn(f"{saves} failed during training:\n  {shown}", stacklevel=2)

    def forget_interrupted(self) -> None:
        """Before a new run: let what an interrupted one left finish, and say what it met."""
        try:
            self._writer.wait()
        except Exception as error:  # noqa: BLE001  # of another run: said, not raised again
            warnings.warn(f"A save of the run before failed: {error}", stacklevel=2)

    def _snapshot_of(self, source: Any) -> Snapshot:
        if isinstance(source, Snapshot):
            return source
        return shared_capture(FORMATS[self._format], source, self._scratch)

    @property
    def _scratch(self) -> Path | None:
        return None if self._store is None else self._store.directory

    def _store_in(self, directory: Path) -> CheckpointStore:
        real = Path(os.path.realpath(directory))
        if self._store is None or self._store.directory != real:
            self._store = CheckpointStore(
                directory, format=self._format, locks=self._locks, worker=self._worker
            )
        return self._store

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._tolerant:
                raise
            text = f"{type(error).__name__}: {error}"
            _log.warning("A save failed, training goes on: %s", text)
            self._failures.append(text)
            self._unsaid.append(f"A save failed, training goes on. {text}")

    def __getstate__(self) -> tuple[Any, ...]:
        return self._settings

    def __setstate__(self, settings: tuple[Any, ...]) -> None:
        # A copy (as tuners make of callbacks) has nothing pending and nothing open.
        background, on_error, locks = settings
        self.__init__(background=background, on_error=on_error, locks=locks)  # type: ignore[misc]
