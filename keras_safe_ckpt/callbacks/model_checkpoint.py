"""`SafeModelCheckpoint`: in place of ``keras.callbacks.ModelCheckpoint``."""

from __future__ import annotations

import datetime
import logging
import math
import os
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

from keras_safe_ckpt.callbacks.messages import say
from keras_safe_ckpt.cluster.roles import Role, role_of
from keras_safe_ckpt.cluster.write_policies import (
    WritePolicy,
    ensure_places_differ,
    find_policy,
    saved_under,
)
from keras_safe_ckpt.storage.keras_internals import better_direction, import_keras
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.lookup import best_first, load_in_order, newest_first
from keras_safe_ckpt.storage.path_template import PathTemplate
from keras_safe_ckpt.storage.paths import absolute
from keras_safe_ckpt.storage.retention import Checkpoint, unless_newer
from keras_safe_ckpt.training.best import Best, learn_from_disk
from keras_safe_ckpt.training.cadence import AnyOf, Cadence, EveryBatches, EveryEpoch, EverySeconds
from keras_safe_ckpt.training.keeping import Keeping
from keras_safe_ckpt.training.logs import monitored_value, numbers_in
from keras_safe_ckpt.training.saver import Saver, SaveRequest

_log = logging.getLogger(__name__)

_ModelCheckpoint: Any = import_keras().callbacks.ModelCheckpoint


class SafeModelCheckpoint(_ModelCheckpoint):  # type: ignore[misc]
    """`keras.callbacks.ModelCheckpoint` that no crash, race or full disk can harm.

    The arguments up to ``initial_value_threshold`` are those of Keras and mean the same.

    Args:
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
    ) -> None:
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
        absolute(self.filepath)  # Raises for what is not a path of a file system.
        self._given = PathTemplate(self.filepath)
        self._policy = find_policy(write_policy)
        self._keeping = Keeping(max_to_keep, keep_best, keep_every)
        self._keeping.ensure_fits(self._given)
        self._save_every_seconds = save_every_seconds
        self._cadence = _cadence(save_freq, save_every_seconds)
        self._saver = Saver(
            format=_format(self.filepath, save_weights_only),
            background=background,
            on_error=on_error,
            locks=locks,
        )
        self._role: Role | None = None
        self._said_role = ""
        self._template = self._shown = self._given
        self._writes = True
        self._direction_is_open = True
        self._epoch = 0
        self._last_batch = -1
        self._batches = 0
        self._saves = 0
        self._found: Checkpoint | None = None
        self._news: deque[str] = deque()

    @property
    def best(self) -> float | None:
        """The best value whose file is durable."""
        return self._best.value

    @best.setter
    def best(self, value: float | None) -> None:
        self._best.value = None if value is None else float(value)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._saver.forget_interrupted()
        self._begin()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._report()
        if self._direction_is_open:
            self._settle_direction()
        self._batches += batch - self._last_batch
        self._last_batch = batch
        if self._cadence.after_batch(batch):
            self._save(self._epoch, batch, logs or {})

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._report()
        if self._cadence.after_epoch():
            self._save(epoch, None, logs or {})

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        try:
            self._saver.finish()
        finally:
            self._say_news()
            self._role = None
        if self._writes and self._found is not None and not self._saves:
            _log.warning(
                "Nothing was saved: %s never got better than %.5f, which %s has since before this "
                "training. To start over, delete that file or use another filepath.",
                self.monitor, self.best, self._found.path,
            )  # fmt: skip

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
        and optimizer are replaced, else a ``.keras`` file becomes a new model. By what it is the
        best, the files say themselves; ``worker`` looks at those of one worker only. A file that
        is damaged is passed over, and said.
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
        """The newest model that was saved under ``filepath``, verified; as `load_best`."""
        templates = saved_under(filepath, worker)
        return load_in_order(templates, newest_first, model, custom_objects)

    def _begin(self) -> None:
        """Everything that can be wrong is found here, before the first batch."""
        if "batch" in self._given.fields and isinstance(self._cadence, EveryEpoch):
            raise self._cannot_format("'batch', which is only known with save_freq=<batches>")
        role = self._role = role_of(self.model)
        self._writes = self._policy.writes(role)
        self._shown = self._policy.place(self._given, role)
        here = os.getcwd().replace("{", "{{").replace("}", "}}")
        self._template = PathTemplate(os.path.join(here, self._shown.text))
        self._say_role(role)
        if self._save_every_seconds is not None and _together(role):
            raise ValueError(
                "Expected no save_every_seconds where several workers train one model: their "
                "clocks differ, and all must capture after the same batch. Use save_freq. "
                f"Received: save_every_seconds={self._save_every_seconds}"
            )
        if self._keeping.deletes:
            ensure_places_differ(self._policy, self._given, role)
        self._cadence.saved()
        self._saves = 0
        self._found = None
        if self._writes:
            apart = self._shown.text != self._given.text
            self._saver.open(self._template, role.task if apart else None)
        self._best.mode = None
        self._direction_is_open = True
        self._settle_direction(final=False)

    def _say_role(self, role: Role) -> None:
        task = f"writes {self._shown.text}" if self._writes else "does not write"
        text = f"{self._policy!r}: this process {task}; it is {role}"
        if text != self._said_role:
            self._said_role = text
            _log.info("SafeModelCheckpoint, write policy %s", text)

    def _settle_direction(self, final: bool = True) -> None:
        """Learn whether less or more is better; Keras knows once the metrics are built."""
        try:
            self._best.mode = better_direction(self)
        except ValueError:
            if final and (self.save_best_only or self._keeping.deletes):
                raise
            self._direction_is_open = not final
            return
        self._direction_is_open = False
        if self.save_best_only and self._writes:
            self._learn_from_disk()

    def _learn_from_disk(self) -> None:
        """A restart must not forget what the best was."""
        self._found, doubts = learn_from_disk(self._best, self._template)
        for doubt in doubts:
            warnings.warn(doubt, stacklevel=2)
        if self._found is not None:
            text = f"{self.monitor} was {self.best:.5f} in {self._found.path}, from before"
            _log.info("Best so far: %s", text)
            if self.verbose > 0:
                say(f"\nBest so far: {text}")

    def _save(self, epoch: int, batch: int | None, logs: Mapping[str, Any]) -> None:
        if self._role is None:  # Called by hand, without on_train_begin.
            self._begin()
        assert self._role is not None
        if self._direction_is_open:
            self._settle_direction()
        shown = self._fill(self._shown, epoch, batch, logs)
        source = self.model
        if _together(self._role):
            # Reading a variable may be a collective: all workers, whatever they do with it.
            source = self._saver.capture(self.model)
        if not self._writes:
            return
        judged = self.save_best_only or self._keeping.keep_best is not None
        value = monitored_value(logs, self.monitor) if judged else None
        if self.save_best_only and not self._worth_saving(epoch, value, shown):
            return
        if not self.save_best_only and self.verbose > 0:
            say(f"\nEpoch {epoch + 1}: saving model to {shown}")
        retention = self._keeping.policy(self.monitor, self._best.mode)
        if judged and (value is None or math.isnan(value)):
            retention = None  # Who knows which one is the best: delete nothing.
        request = SaveRequest(
            path=self._fill(self._template, epoch, batch, logs),
            series=self._template.name,
            step=self._step(),
            # Finished epochs, and finished batches of the one after.
            epoch=epoch + 1 if batch is None else epoch,
            batch=None if batch is None else batch + 1,
            metrics=numbers_in(logs),
            monitor=self.monitor,
            mode=self._best.mode,
            veto=self._best.veto(value) if self.save_best_only else unless_newer,
            retention=retention,
        )
        self._cadence.saved()

        def done(checkpoint: Checkpoint | None) -> None:
            if checkpoint is not None:
                self._saves += 1
                if self.save_best_only:
                    self._best.learn(value)
            outcome = "finished saving model to" if checkpoint else "kept the better model in"
            self._news.append(f"\nEpoch {epoch + 1}: {outcome} {shown}")

        self._saver.save(source, request, done)
        self._report()

    def _worth_saving(self, epoch: int, value: float | None, shown: str) -> bool:
        """As Keras decides, against what is durable, and with the words of Keras."""
        if value is None:
            return True  # Keras saves what it cannot judge; it replaces nothing that is judged.
        if math.isnan(value):
            warnings.warn(f"{self.monitor} is NaN: not saved as the best model.", stacklevel=2)
            return False
        if self._best.beaten_by(value) and self._saver.busy:
            # What is being written now is the best only when it is durable.
            self._saver.wait()
            self._report()
        before = "None" if self.best is None else f"{self.best:.5f}"
        better = self._best.beaten_by(value)
        if self.verbose > 0:
            change = (
                f"improved from {before} to {value:.5f}, saving model to {shown}"
                if better
                else f"did not improve from {before}"
            )
            say(f"\nEpoch {epoch + 1}: {self.monitor} {change}")
        return better

    def _fill(
        self, template: PathTemplate, epoch: int, batch: int | None, logs: Mapping[str, Any]
    ) -> str:
        values = {"batch": self._last_batch + 1, **logs, "epoch": epoch + 1}
        if batch is None and self._save_every_seconds is None and "batch" not in logs:
            del values["batch"]
        try:
            return template.fill(values)
        except KeyError as error:
            raise self._cannot_format(str(error)) from None

    def _cannot_format(self, reason: str) -> KeyError:
        return KeyError(
            f'Failed to format this callback filepath: "{self.filepath}". Reason: {reason}'
        )

    def _step(self) -> int:
        iterations = getattr(getattr(self.model, "optimizer", None), "iterations", None)
        return self._batches if iterations is None else int(iterations.numpy())

    def _report(self) -> None:
        if self._news:
            self._say_news()
        self._saver.poll()

    def _say_news(self) -> None:
        while self._news:
            text = self._news.popleft()
            if self.verbose > 0:
                say(text)

    def __getstate__(self) -> dict[str, Any]:
        # A copy (as tuners make) trains another model: it keeps the settings and the best value.
        return {**vars(self), "_model": None, "_role": None, "_found": None, "_news": deque()}


def _cadence(save_freq: str | int, seconds: float | None) -> Cadence:
    cadence: Cadence = EveryEpoch() if isinstance(save_freq, str) else EveryBatches(save_freq)
    return cadence if seconds is None else AnyOf([cadence, EverySeconds(seconds)])


def _format(filepath: str, weights_only: bool) -> str:
    if weights_only:
        return "weights_h5"
    if filepath.endswith(".weights.h5"):
        raise ValueError(
            "A file that ends in .weights.h5 holds weights: expected save_weights_only=True, or "
            f".keras for the whole model. Received: filepath={filepath!r}"
        )
    return "keras" if filepath.endswith(".keras") else "legacy_h5"


def _together(role: Role) -> bool:
    return role.synchronous and not role.alone
