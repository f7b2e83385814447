"""A directory of checkpoints: publish, load, verify, prune."""

from __future__ import annotations

import json
import operator
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
)
from keras_safe_ckpt.storage.atomic import ensure_writable
from keras_safe_ckpt.storage.catalog import Catalog, OnSkip
from keras_safe_ckpt.storage.events import EventLog
from keras_safe_ckpt.storage.formats import FORMATS, format_of
from keras_safe_ckpt.storage.formats.format import EXTRA_GROUP, StorageFormat
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.locks import chosen_locks
from keras_safe_ckpt.storage.manifest import Manifest, describe_writer
from keras_safe_ckpt.storage.paths import (
    absolute,
    make_directory,
    refuse_unsafe_name,
)
from keras_safe_ckpt.storage.pruning import Pruner
from keras_safe_ckpt.storage.publishing import LOCK_NAME, Publisher
from keras_safe_ckpt.storage.restore import load_file, load_first_whole, none_is_whole
from keras_safe_ckpt.storage.retention import (
    Checkpoint,
    Retention,
    SetAside,
    Veto,
    unless_newer,
)
from keras_safe_ckpt.storage.snapshot import Snapshot, freeze
from keras_safe_ckpt.storage.writer import BackgroundWriter


class CheckpointStore:
    """The checkpoints in ``directory``, safe to share among threads, processes and hosts.

    Args:
        directory: created if it is missing.
        format: ``"weights_h5"`` (weights and optimizer), ``"keras"`` (the whole model) or
            ``"legacy_h5"`` (the whole model in the file of Keras 2, not captured in passing).
        locks: a `LockManager` (default) or `RedisLocks`.
        worker: who this process is among several, for manifests and messages.

    Example::

        store = CheckpointStore("checkpoints")
        store.publish(model, step=100, metrics={"loss": 0.5})  # durable when it returns
        store.publish(model, step=200, background=True)        # captured when it returns
        store.load(model)                                      # the newest that is whole
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        format: str | StorageFormat = "weights_h5",
        locks: Locks | None = None,
        worker: str | None = None,
    ) -> None:
        if isinstance(format, str):
            if format not in FORMATS:
                raise ValueError(
                    f"Expected format to be one of {sorted(FORMATS)}. Received: format={format!r}"
                )
            format = FORMATS[format]
        self.directory = Path(os.path.realpath(absolute(directory)))
        self.format = format
        self.locks: Locks = chosen_locks(locks, worker=worker)
        self.worker = worker
        make_directory(self.directory)
        ensure_writable(self.directory)
        self.locks.check(self.directory)
        self.events = EventLog(self.directory)
        self._catalog = Catalog(self.directory, format.suffix)
        self._pruner = Pruner(self._catalog, self.events)
        self._publisher = Publisher(format, self.locks, self._catalog, self._pruner, self.events)
        self._writer = BackgroundWriter()

    def publish(
        self,
        model_or_snapshot: Any,
        *,
        step: int,
        epoch: int | None = None,
        batch: int | None = None,
        metrics: Mapping[str, float] | None = None,
        monitor: str | None = None,
        mode: str | None = None,
        extra: Mapping[str, Any] | None = None,
        extra_arrays: Mapping[str, Any] | None = None,
        name: str | None = None,
        series: str | None = None,
        veto: Veto = unless_newer,
        set_aside: SetAside | None = None,
        retention: Retention | None = None,
        background: bool = False,
    ) -> Checkpoint | None:
        """Save a model, or a snapshot taken of it before.

        Args:
            model_or_snapshot: the model as it is now is captured.
            step: goes into the manifest, and into the file name if there is no ``name``.
            epoch: how many epochs are finished.
            batch: how many batches of the next one are.
            metrics: numbers by name.
            monitor: the metric by which this checkpoint is judged.
            mode: whether ``"min"`` or ``"max"`` of it is better.
            extra: anything that JSON can hold.
            extra_arrays: arrays beside those of the model, see the method `extra_arrays`.
            name: of the file; without one it is ``ckpt-`` and the step.
            series: what ``retention`` looks at: without a ``name`` the numbered ones, a ``name`` of
                your own is a series of its own.
            veto: asked under the lock, with the manifests of what is in place and of what is to
                replace it: a text is the reason to leave the former. By default it stays if it is
                newer.
            set_aside: asked in the same way whether to keep the former under another name
                (``3.keras`` becomes ``3~2.keras``).
            retention: deletes older checkpoints of the same series and worker, never this one.
            background: the model is captured when this returns, and durable after `wait`. An error
                is raised by the next call.

        Returns:
            The checkpoint; None if the veto kept the one in place, or in the background.
        """
        self._writer.raise_error()
        _check_options(metrics, series, veto, set_aside, retention)
        step = _whole_number("step", step)
        series = series or name or f"ckpt-*{self.format.suffix}"
        if name is None:
            name = f"ckpt-{step:010d}{self.format.suffix}"
        refuse_unsafe_name(name, self.directory)
        if not name.endswith(self.format.suffix):
            raise ValueError(
                f"Expected a name that ends in {self.format.suffix!r}. Received: name={name!r}"
            )
        snapshot = self._snapshot(model_or_snapshot, extra_arrays or {})
        draft = Manifest(
            step=step,
            epoch=None if epoch is None else _whole_number("epoch", epoch),
            batch=None if batch is None else _whole_number("batch", batch),
            metrics={str(key): float(value) for key, value in (metrics or {}).items()},
            monitor=monitor,
            mode=mode,
            # As it will be read back, and as it is now: the caller may go on changing it.
            extra=json.loads(json.dumps(dict(extra or {}))),
            series=series,
            name=name,
            optimizer=snapshot.optimizer,
            **describe_writer(self.worker),
        )

        def save() -> Checkpoint | None:
            return self._publisher.publish(snapshot, draft, veto, set_aside, retention)

        if background:
            self._writer.submit(save)
            return None
        return self._writer.run(save)

    def wait(self) -> None:
        """Return when every save is durable; raise what one of them raised."""
        self._writer.wait()

    def checkpoints(self, on_skip: OnSkip | None = None) -> list[Checkpoint]:
        """All files here that carry our manifest, oldest first; their arrays are not verified.

        ``on_skip(path, reason)`` is told of each file that is passed over.
        """
        return self._catalog.checkpoints(on_skip)

    def latest(self, on_skip: OnSkip | None = None) -> Checkpoint | None:
        """The newest checkpoint whose digests hold; None if there is none.

        Each file passed over is reported with its reason: to ``on_skip``, else in the log.
        """
        return self._catalog.latest(self.events.report_skip if on_skip is None else on_skip)

    def verify(self, path: str | os.PathLike[str]) -> Manifest:
        """Compare every byte at ``path`` with its manifest, which is returned.

        Raises:
            CorruptCheckpointError: if one differs.
        """
        with format_of(path := self._resolved(path)).open(path) as checkpoint:
            checkpoint.verify()
        return checkpoint.manifest

    def load(
        self,
        model: Any = None,
        path: str | os.PathLike[str] | None = None,
        *,
        custom_objects: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Manifest]:
        """Load the newest whole checkpoint, or the one at ``path``, verified.

        ``path`` is absolute (as that of a ``Checkpoint``) or a name in the directory of the store.
        With a ``model`` its weights and optimizer are replaced, or, if anything does not fit,
        left as they were. Without one the file must hold a whole model, and a new one is made, with
        ``custom_objects`` for Keras. Returns the model and the manifest.
        """
        self._writer.wait()
        began = time.perf_counter()
        if path is None:
            source, model, manifest = self._load_newest(model, custom_objects)
        else:
            source = self._resolved(path)
            model, manifest = load_file(source, model, custom_objects)
        self.events.report_restore(source, manifest, time.perf_counter() - began)
        return model, manifest

    def extra_arrays(self, path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays that were published at ``path`` beside those of the model, verified."""
        prefix = f"{EXTRA_GROUP}/"
        with format_of(path := self._resolved(path)).open(path) as checkpoint:
            return {
                name.removeprefix(prefix): np.array(checkpoint.read_array(name))
                for name in checkpoint.manifest.arrays
                if name.startswith(prefix)
            }

    def check_target(self, name: str) -> None:
        """Raise if a save under ``name`` could not replace what is there."""
        self._publisher.check_target(name)

    @property
    def last_size(self) -> int:
        """Of the file that was published last; 0 before the first."""
        return self._publisher.last_size

    def prune(self, policy: Retention) -> list[Path]:
        """Delete what ``policy`` does not keep; return what was deleted.

        The policy is asked for each series by itself, so that a periodic save never displaces a
        best model. Only files that carry our manifest are ever touched, and none before one of
        the series that stays has been verified.
        """
        self._writer.wait()
        with self.locks.exclusive(self.directory / LOCK_NAME) as lock:
            return self._pruner.prune_each_series(policy, lock)

    def delete_series(self, series: str) -> list[Path]:
        """Delete all checkpoints that were published under ``series``; return what was deleted."""
        self._writer.wait()
        with self.locks.exclusive(self.directory / LOCK_NAME) as lock:
            return self._pruner.delete_series(series, lock)

    def _snapshot(self, source: Any, extra_arrays: Mapping[str, Any]) -> Snapshot:
        snapshot = (
            source if isinstance(source, Snapshot) else self.format.capture(source, self.directory)
        )
        added = {f"{EXTRA_GROUP}/{_checked_key(k)}": freeze(v) for k, v in extra_arrays.items()}
        return replace(snapshot, arrays={**snapshot.arrays, **added})

    def _load_newest(
        self, model: Any, custom_objects: Mapping[str, Any] | None
    ) -> tuple[Path, Any, Manifest]:
        skipped: list[str] = []

        def report(path: Path, reason: str) -> None:
            skipped.append(reason)
            self.events.report_skip(path, reason)

        present = self.checkpoints(report)
        candidates = [
            checkpoint
            for checkpoint in reversed(present)
            if model is not None or format_of(checkpoint.path).whole_model
        ]
        loaded = load_first_whole(candidates, model, custom_objects, report)
        if loaded is not None:
            return loaded
        if skipped:
            raise none_is_whole(self.directory, skipped)
        holds = "weights only: pass a model to load them into" if present else "no checkpoint"
        raise CheckpointNotFoundError(self.directory, f"the directory holds {holds}")

    def _resolved(self, path: str | os.PathLike[str]) -> Path:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"Expected the path of a checkpoint. Received: path={path!r}")
        return absolute(self.directory / path)


def _check_options(
    metrics: object, series: object, veto: object, set_aside: object, retention: object
) -> None:
    """Before anything is written: what comes after the commit cannot be taken back."""
    expected = [
        ("metrics", metrics, "numbers by name", isinstance(metrics or {}, Mapping)),
        ("series", series, "a text", isinstance(series or "", str)),
        ("veto", veto, "a function", callable(veto)),
        ("set_aside", set_aside, "a function", set_aside is None or callable(set_aside)),
        (
            "retention",
            retention,
            "a policy such as KeepNewest(3)",
            retention is None or callable(getattr(retention, "keep", None)),
        ),
    ]
    for name, value, what, is_fine in expected:
        if not is_fine:
            raise TypeError(f"Expected {name} to be {what}. Received: {name}={value!r}")


def _checked_key(key: str) -> str:
    """HDF5 reads a name as a path, and some as another one than was written."""
    if any(part in ("", ".") or "\0" in part for part in key.split("/")):
        raise ValueError(f"Expected names like 'a' or 'a/b' for extra_arrays. Received: {key!r}")
    return key


def _whole_number(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"Expected {name} to be a whole number. Received: {value!r}") from None
