"""From a model at a batch boundary to a durable file, in the background, errors included."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_safe_ckpt.storage.atomic import ensure_writable
from keras_safe_ckpt.storage.events import EventLog, Listener
from keras_safe_ckpt.storage.formats import FORMATS
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.locks import chosen_locks
from keras_safe_ckpt.storage.path_template import PathTemplate
from keras_safe_ckpt.storage.paths import absolute, refuse_unsafe_target
from keras_safe_ckpt.storage.retention import (
    Checkpoint,
    Retention,
    SetAside,
    Veto,
    unless_newer,
)
from keras_safe_ckpt.storage.room import ensure_room
from keras_safe_ckpt.storage.shared_capture import shared_capture
from keras_safe_ckpt.storage.snapshot import Snapshot
from keras_safe_ckpt.storage.store import CheckpointStore
from keras_safe_ckpt.storage.writer import BackgroundWriter

#: A disk that stays full is not worth a warning at each batch.
_SAID_AT_ONCE = 3


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
    set_aside: SetAside | None = None
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
        chosen_locks(locks)  # Refuses now what cannot lock.
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
        self._last_file = ""
        #: Is told of the events of the stores that are opened from now on.
        self.listener: Listener | None = None

    def use_format(self, format: str) -> None:
        """What to capture from now on, also where another worker writes it."""
        self._format = format
        self._store = None
        self._failures.clear()

    def open(self, template: PathTemplate, worker: str | None, largest: float) -> None:
        """Find out now what a save would find out after hours: rights, locks, room.

        The model needs ``largest`` bytes at most: the file of a larger one before says nothing.
        """
        self._worker = worker
        self._last_size = 0
        for path in template.obstacles():
            refuse_unsafe_target(path)
        if template.parent.fields:
            ensure_writable(absolute(os.path.join(template.deepest_fixed_directory(), ".")))
            return
        store = self._store_in(Path(template.parent.fill({}) or "."))
        if not template.fields:
            store.check_target(template.name.format())
        previous = [c.path for c in store.checkpoints() if c.manifest.series == template.name]
        if previous:
            self._last_size = os.path.getsize(previous[-1])
            with self._tolerated():
                ensure_room(previous[-1], int(min(self._last_size, largest)))

    @property
    def events(self) -> EventLog | None:
        """The log beside the files; None as long as it is not known where they go."""
        return None if self._store is None else self._store.events

    def capture(self, model: Any) -> Snapshot | None:
        """Capture together with all other workers, whoever writes; None if that is tolerated."""
        captured: list[Snapshot] = []
        with self._tolerated(), self._recorded():
            captured.append(FORMATS[self._format].capture(model, self._scratch))
        return captured[0] if captured else None

    def save(self, source: Any, request: SaveRequest, done: OnDone) -> None:
        """Write a snapshot, or a model as it is now, in the background or at once.

        Call `wait` first: memory should hold one snapshot, not two.
        """
        with self._tolerated():
            path = absolute(request.path)
            store = self._store_in(path.parent)
            with self._recorded(file=path.name, step=request.step, epoch=request.epoch):
                if self._format == "legacy_h5":  # Which Keras writes before its size is known.
                    ensure_room(path, self._last_size, request.step)
                snapshot = self._snapshot_of(source)

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
                        set_aside=request.set_aside,
                        retention=request.retention,
                    )
                    self._last_size = store.last_size
                    done(checkpoint)

            self._last_file = path.name
            if self._background:
                self._writer.submit(job)
            else:
                with self._waiting():
                    self._writer.run(job)

    def poll(self) -> None:
        """Raise or warn of what went wrong since the last call; wait for nothing."""
        self._writer.raise_error()
        while self._unsaid:
            warnings.warn(self._unsaid.popleft(), stacklevel=2)

    def wait(self) -> None:
        """Return when nothing is pending."""
        with self._waiting():
            self._writer.wait()

    def finish(self) -> None:
        """Wait for the last save; raise what it raised, or say again what went wrong."""
        try:
            self.wait()
        finally:
            self._store = None
        self._unsaid.clear()
        if self._failures:
            count = len(self._failures)
            saves = "1 save" if count == 1 else f"{count} saves"
            shown = list(dict.fromkeys([self._failures[0], self._failures[-1]]))
            text = "\n  ".join([f"{saves} failed during training:", *shown])
            more = "\nAll of them are in events.jsonl." if count > len(shown) else ""
            warnings.warn(text + more, stacklevel=2)

    def forget_interrupted(self) -> None:
        """Before a new run: let what an interrupted one left finish, and say what it met."""
        try:
            self._writer.wait()
        except Exception as error:  # noqa: BLE001  # of another run: said, not raised again
            warnings.warn(f"A save of the run before failed: {error}", stacklevel=2)

    def _snapshot_of(self, source: Any) -> Snapshot:
        if isinstance(source, Snapshot):
            return source
        if self._format == "legacy_h5":  # Holds the bytes of a file, which serve nobody else.
            return FORMATS[self._format].capture(source, self._scratch)
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
            self._store.events.listener = self.listener
        return self._store

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        events = self.events
        return contextlib.nullcontext() if events is None else events.waiting(file=self._last_file)

    @contextlib.contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._tolerant:
                raise
            text = f"{type(error).__name__}: {error}"
            self._failures.append(text)
            if len(self._failures) <= _SAID_AT_ONCE:
                self._unsaid.append(f"A save failed, training goes on. {text}")

    @contextlib.contextmanager
    def _recorded(self, **facts: Any) -> Iterator[None]:
        """What fails before the store is asked goes to its log as well."""
        try:
            yield
        except Exception as error:
            if self.events is not None:
                kind = type(error).__name__
                self.events.record("error", error=str(error), kind=kind, **facts)
            raise

    def __getstate__(self) -> tuple[Any, ...]:
        return self._settings

    def __setstate__(self, settings: tuple[Any, ...]) -> None:
        # A copy (as tuners make of callbacks) has nothing pending and nothing open.
        background, on_error, locks = settings
        self.__init__(background=background, on_error=on_error, locks=locks)  # type: ignore[misc]
