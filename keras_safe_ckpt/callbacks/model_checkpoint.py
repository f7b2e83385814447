"""`SafeModelCheckpoint`: in place of ``keras.callbacks.ModelCheckpoint``."""

from __future__ import annotations

import copy
import datetime
import logging
import os
from collections.abc import Mapping
from typing import Any

from keras_safe_ckpt.callbacks.checkpoint_run import CheckpointRun, Moment, Settings, cannot_format
from keras_safe_ckpt.callbacks.scalars import check_log_dir
from keras_safe_ckpt.cluster.multi_worker import warn_if_needed
from keras_safe_ckpt.cluster.write_policies import WritePolicy, find_policy, saved_under
from keras_safe_ckpt.storage.keras_internals import import_keras
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.lookup import best_first, load_in_order, newest_first
from keras_safe_ckpt.storage.path_template import PathTemplate
from keras_safe_ckpt.storage.paths import absolute
from keras_safe_ckpt.training.best import Best
from keras_safe_ckpt.training.cadence import AnyOf, Cadence, EveryBatches, EveryEpoch, EverySeconds
from keras_safe_ckpt.training.keeping import Keeping
from keras_safe_ckpt.training.saver import Saver

_log = logging.getLogger(__name__)

_ModelCheckpoint: Any = import_keras().callbacks.ModelCheckpoint


class SafeModelCheckpoint(_ModelCheckpoint):  # type: ignore[misc]
    """`keras.callbacks.ModelCheckpoint` that no crash, race or full disk can harm.

    The arguments up to ``initial_value_threshold`` are those of Keras and mean the same.

    Args:
        filepath: where the model goes, with placeholders such as ``{epoch:02d}``, ``{batch}``,
            ``{val_loss:.2f}`` and ``{worker}``. It ends in ``.keras`` or ``.h5`` for whole models,
            in ``.weights.h5`` for weights.
        monitor: the metric by which one model is better than another.
        verbose: 1 says in a line what was saved.
        save_best_only: save only what is better than all before, the file on the disk included.
        save_weights_only: weights and optimizer instead of the whole model.
        mode: ``"min"``, ``"max"``, or ``"auto"`` to tell by the metric.
        save_freq: ``"epoch"``, or after so many batches.
        initial_value_threshold: what the first model must be better than.
        background: capture the model (milliseconds) and write while training goes on. False:
            the model is durable when the batch or epoch ends.
        write_policy: who writes when several processes train: ``"auto"`` (the chief if they
            train one model together, else each to a path of its own), ``"chief"``,
            ``"per_worker"``, or an object. ``{worker}`` in the path is the worker's number;
            without it each gets a folder ``worker-<n>``.
        max_to_keep: keep the newest n.
        keep_best: keep the best k by ``monitor``. The best one stays in any case.
        keep_every: keep one of every n epochs, or of every `datetime.timedelta`.
        save_every_seconds: save when so long after the last save, besides ``save_freq``.
        on_error: ``"raise"`` at the next batch or epoch when a save failed, or ``"warn"``.
        locks: a `LockManager` (default) or `RedisLocks`.
        log_dir: of TensorBoard, for scalars of what saves take; that of a
            ``keras.callbacks.TensorBoard`` in the same `fit` unless given.

    Example::

        callback = SafeModelCheckpoint("best.keras", monitor="val_loss", save_best_only=True)
        model.fit(x, y, validation_split=0.2, epochs=10, callbacks=[callback])
        best = SafeModelCheckpoint.load_best("best.keras")
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
        *,
        background: bool = True,
        write_policy: str | WritePolicy = "auto",
        max_to_keep: int | None = None,
        keep_best: int | None = None,
        keep_every: int | datetime.timedelta | None = None,
        save_every_seconds: float | None = None,
        on_error: str = "raise",
        locks: Locks | None = None,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(monitor, str):
            raise ValueError(f"Expected monitor to be a string. Received: monitor={monitor!r}")
        warn_if_needed()
        self._best = Best(monitor)
        # Its checks and its words for extensions, save_freq and mode.
        super().__init__(
            filepath,
            monitor,
            verbose,
            save_best_only,
            save_weights_only,
            mode,
            save_freq,
            initial_value_threshold,
        )
        self._policy = find_policy(write_policy)
        self._keeping = Keeping(max_to_keep, keep_best, keep_every)
        self._save_every_seconds = save_every_seconds
        self._log_dir = check_log_dir(log_dir)
        self._saver = Saver(background=background, on_error=on_error, locks=locks)
        self._configure()
        self._run: CheckpointRun | None = None
        self._said_role = ""
        self._epoch = 0
        self._last_batch = -1
        self._batches = 0

    @property
    def best(self) -> float | None:
        """The best value whose file is durable."""
        return self._best.value

    @best.setter
    def best(self, value: float | None) -> None:
        self._threshold = None if value is None else float(value)
        self._best.value = self._threshold

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._saver.forget_interrupted()
        self._begin()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        run = self._run or self._begin()
        run.report()
        if run.direction_is_open:
            run.settle_direction()
        self._batches += batch - self._last_batch
        self._last_batch = batch
        if self._cadence.after_batch(batch):
            self._save(run, self._epoch, batch, logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        run = self._run or self._begin()
        run.report()
        if self._cadence.after_epoch():
            self._save(run, epoch, None, logs)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def get_state(self) -> dict[str, Any]:
        """What a run that is interrupted and continued needs to save at the same batches.

        What the best was is not part of it: that is in the files.
        """
        return {
            "epoch": self._epoch,
            "last_batch": self._last_batch,
            "batches": self._batches,
            "cadence": self._cadence.get_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on as the callback did that returned ``state``."""
        self._epoch = state["epoch"]
        self._last_batch = state["last_batch"]
        self._batches = state["batches"]
        if len(self._cadence.get_state()) == len(state["cadence"]):  # Else it is another one.
            self._cadence.set_state(state["cadence"])

    @staticmethod
    def load_best(
        filepath: str | os.PathLike[str],
        model: Any = None,
        *,
        monitor: str | None = None,
        mode: str | None = None,
        worker: int | None = None,
        custom_objects: Mapping[str, Any] | None = None,
    ) -> Any:
        """The best model that was saved under ``filepath``, verified.

        ``filepath`` is that of the callback, placeholders and all. With a ``model`` its weights
        and optimizer are replaced, else a file with a whole model becomes a new one. By what it
        is the best, the files say themselves; or pass ``monitor`` and ``mode``. One of several
        workers gets its own; ``worker`` asks for that of another. A file that is damaged is
        passed over, and said. ``custom_objects`` are for Keras, by name.
        """
        templates = saved_under(filepath, worker)
        return load_in_order(templates, best_first(monitor, mode), model, custom_objects)

    @staticmethod
    def load_latest(
        filepath: str | os.PathLike[str],
        model: Any = None,
        *,
        worker: int | None = None,
        custom_objects: Mapping[str, Any] | None = None,
    ) -> Any:
        """The newest model that was saved under ``filepath``, verified.

        ``model``, ``worker`` and ``custom_objects`` as for `load_best`.
        """
        templates = saved_under(filepath, worker)
        return load_in_order(templates, newest_first, model, custom_objects)

    def _configure(self) -> None:
        """Take over what Keras keeps in public attributes, which a program may set at any time."""
        self._configured = (self.filepath, self.save_freq, self.save_weights_only)
        absolute(self.filepath)  # Raises for what is not a path of a file system.
        self._settings = Settings(
            PathTemplate(self.filepath),
            _format(self.filepath, self.save_weights_only),
            self._policy,
            self._keeping,
            self.save_freq,
            self._save_every_seconds,
            self._log_dir,
        )
        self._settings.check(self._settings.template)
        self._cadence = _cadence(self.save_freq, self._save_every_seconds)

    def _begin(self) -> CheckpointRun:
        if self._configured != (self.filepath, self.save_freq, self.save_weights_only):
            self._configure()
        if "batch" in self._settings.template.fields and isinstance(self._cadence, EveryEpoch):
            reason = "'batch', which is only known with save_freq=<batches>"
            raise cannot_format(self.filepath, reason)
        # What is on the disk counts, not what was there in an earlier fit.
        self._best.monitor = self.monitor
        self._best.value = self._threshold
        self._cadence.saved()
        self._batches = 0
        if self._run is not None:
            self._run.close()
        self._run = CheckpointRun(self, self._settings, self._best, self._saver)
        if str(self._run) != self._said_role:
            self._said_role = str(self._run)
            _log.info("SafeModelCheckpoint, %s", self._run)
        return self._run

    def _save(
        self, run: CheckpointRun, epoch: int, batch: int | None, logs: Mapping[str, Any] | None
    ) -> None:
        moment = Moment(epoch, batch, self._last_batch + 1, self._batches)
        if run.save(moment, logs or {}):
            self._cadence.saved()

    def __getstate__(self) -> dict[str, Any]:
        # A copy (as tuners make) trains another model: it keeps the settings and the best value.
        return {
            **vars(self),
            "_model": None,
            "_run": None,
            "_best": copy.copy(self._best),
            "_cadence": copy.deepcopy(self._cadence),
            "_saver": copy.copy(self._saver),
        }


def _cadence(save_freq: str | int, seconds: float | None) -> Cadence:
    cadence: Cadence = EveryEpoch() if isinstance(save_freq, str) else EveryBatches(save_freq)
    return cadence if seconds is None else AnyOf([cadence, EverySeconds(seconds)])


def _format(filepath: str, weights_only: bool) -> str:
    holds_weights = filepath.endswith(".weights.h5")
    if holds_weights and weights_only:
        return "weights_h5"
    if filepath.endswith((".keras", ".h5")) and not (holds_weights or weights_only):
        return "keras" if filepath.endswith(".keras") else "legacy_h5"
    raise ValueError(
        "Expected a filepath that ends in .weights.h5 with save_weights_only=True, in .keras or "
        f".h5 without. Received: filepath={filepath!r}, save_weights_only={weights_only}"
    )
