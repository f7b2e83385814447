"""`PreemptionAwareCallback`: interrupted anywhere, a `fit` ends as if it had not been."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

from keras_safe_ckpt.callbacks.evaluation_watch import EvaluationWatch
from keras_safe_ckpt.callbacks.preemption_run import PreemptionRun
from keras_safe_ckpt.callbacks.preemption_settings import Settings
from keras_safe_ckpt.callbacks.scalars import check_log_dir
from keras_safe_ckpt.cluster.multi_worker import warn_if_needed
from keras_safe_ckpt.interruption.ending import end_program, with_defaults
from keras_safe_ckpt.preemption.choosing import choose
from keras_safe_ckpt.preemption.leaving import Departure, stay
from keras_safe_ckpt.storage.keras_internals import import_keras
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.paths import absolute
from keras_safe_ckpt.training.keras_fit import find_fit

_Callback: Any = import_keras().callbacks.Callback

#: The runs of this process that were begun, to let go of one whose `fit` has failed.
_open_runs: list[PreemptionRun] = []


class PreemptionAwareCallback(_Callback):  # type: ignore[misc]
    """Lets a run of `fit` be interrupted at any moment, and end as if it had not been.

    When the platform says that the end is near, all workers stop after the same batch, one
    durable checkpoint is written, and the process exits with a code that means "start me again".
    The same program, started again, continues at that batch. Backups in between help when there
    is no notice.

    Args:
        directory: where the checkpoints of this run go; one directory for each `fit`. Workers of
            a cluster must share it.
        save_freq: a backup after each ``"epoch"``, after so many batches, or (None) never.
        save_every_seconds: a backup after so many seconds as well.
        max_to_keep: how many checkpoints stay.
        delete_checkpoint: delete them when training is finished: a program that is killed between
            that and its own end trains anew. Otherwise it finds the end of training, and `fit`
            returns at once, with the history of all of it; or trains on, if ``epochs`` are more.
        restore: True goes on from the newest whole checkpoint, and raises if there are some and
            none fits; ``"if_possible"`` starts afresh then; False always does.
        notices: ``"auto"`` watches for SIGTERM, SLURM's signals in a job of SLURM, and what
            Google, AWS or Azure say on their machines. Or a signal, a function that is asked
            every second, ``"gcp"``, ``"aws"``, ``"azure"``, ``"slurm"``, an object with
            ``start(desk)`` and ``stop()``, a `tf.distribute.experimental.TerminationConfig`, or a
            list of these.
        grace_period: seconds between a notice and the end; None is what the platform gives.
        on_preempted: ``"exit"``, or ``"stop"`` to let `fit` return (see `preempted`).
        exit_code: 42, on Google's machines 143, unless given.
        exit_fn: called instead of exiting.
        save_fn: called at a notice instead of writing a checkpoint; nothing is restored, either.
        verbose: 1 says in a line what happens.
        locks: a `LockManager` (default) or `RedisLocks`.
        log_dir: of TensorBoard, for scalars of saves, notices and resumes; that of a
            ``keras.callbacks.TensorBoard`` in the same `fit` unless given.

    Example::

        keras.utils.set_random_seed(1)
        model.fit(x, y, epochs=10, callbacks=[PreemptionAwareCallback("run/state")])
    """

    belongs_to_preemption = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_freq: str | int | None = "epoch",
        save_every_seconds: float | None = None,
        max_to_keep: int = 2,
        delete_checkpoint: bool = True,
        restore: bool | str = True,
        notices: Any = "auto",
        grace_period: float | None = None,
        on_preempted: str = "exit",
        exit_code: int | None = None,
        exit_fn: Callable[[], object] | None = None,
        save_fn: Callable[[], object] | None = None,
        verbose: int = 1,
        locks: Locks | None = None,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        warn_if_needed()
        choice = choose(notices)
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
            raise ValueError(
                f"Expected directory to be the path of a folder. Received: directory={directory!r}"
            )
        self._settings = Settings(
            directory=str(absolute(directory)),
            save_freq=save_freq,
            save_every_seconds=save_every_seconds,
            max_to_keep=max_to_keep,
            log_dir=check_log_dir(log_dir),
            delete_checkpoint=delete_checkpoint,
            restore=restore,
            choice=choice,
            on_preempted=on_preempted,
            verbose=verbose,
            locks=locks,
            **with_defaults(
                choice,
                grace_period=grace_period,
                exit_code=exit_code,
                exit_fn=exit_fn,
                save_fn=save_fn,
            ),
        )
        self._run: PreemptionRun | None = None
        self._watch: EvaluationWatch | None = None
        self._opened = False
        self._hidden: tuple[Any, list[Any]] | None = None
        #: Why the last run was interrupted; None if it was not.
        self.preempted: str | None = None

    # Keras's hooks.

    def set_params(self, params: Mapping[str, Any]) -> None:
        super().set_params(params)
        self._take_place()

    def on_train_begin(self, logs: Any = None) -> None:
        if not self._opened:  # The list was not found when it was made.
            self._take_place()
            self.open_run()
        assert self._run is not None
        self._opened = False
        try:
            self._run.begin()
        except BaseException:
            run, self._run = self._run, None
            if run is not None:
                _forget(run)
                run.close()
            raise

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._run is not None:
            self._run.epoch_comes()  # Where there is no herald.
            self._run.epoch_begins(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._run is not None:
            self._run.batch_begins()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._run is not None:
            self._run.batch_ends(batch, logs or {})

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._run is not None:
            self._run.test_batch_ends()
        elif self._watch is not None:
            self._watch.batch_ends()
        if self.preempted is not None:
            self.model.stop_evaluating = True

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.on_test_batch_end(batch, logs)
        if self.preempted is not None:
            self.model.stop_predicting = True

    def on_test_begin(self, logs: Any = None) -> None:
        if self._run is None:
            self.preempted = None
            stay()
            if self._watch is not None:  # Of an evaluation that has failed.
                self._watch.close()
            self._watch = EvaluationWatch(self.model, self._settings, self._leave)

    def on_test_end(self, logs: Any = None) -> None:
        if self._run is not None:
            self._run.validation_ends()
        elif self._watch is not None:
            watch, self._watch = self._watch, None
            watch.ends()

    def on_predict_begin(self, logs: Any = None) -> None:
        self.on_test_begin(logs)

    def on_predict_end(self, logs: Any = None) -> None:
        if self._run is None:
            self.on_test_end(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._run is not None:
            self._run.epoch_ends(epoch)
        self._show_others()

    def on_train_end(self, logs: Any = None) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.train_ends()
            _forget(run)

    # For the herald, which stands at the head of the list.

    def open_run(self) -> None:
        """Before the other callbacks hear that training begins."""
        self.preempted = None
        stay()  # Whoever trains again does not leave.
        for other in list(_open_runs):
            if not other.is_running():
                # Its `fit` has failed: the directory, the signals and the rest are free.
                _open_runs.remove(other)
                other.close()
        self._run = PreemptionRun(self, self._settings, self._leave)
        try:
            self._run.open()
        except BaseException:
            self._run.close()
            self._run = None
            raise
        _open_runs.append(self._run)
        self._opened = True

    def epoch_comes(self) -> None:
        """Before the other callbacks hear of it."""
        if self._run is not None:
            self._run.epoch_comes()

    def validation_begins(self, callback_list: Any) -> None:
        """Before the other callbacks of this list hear of it."""
        if self._run is not None:
            self._run.validation_begins(callback_list)

    def training_ends(self) -> None:
        """Before the other callbacks hear of it."""
        if self._run is not None:
            self._run.training_ends()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_model": None,
            "_run": None,
            "_watch": None,
            "_hidden": None,
            "_opened": False,
            "preempted": None,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> PreemptionAwareCallback:
        # A copy (as tuners make) trains another model: it has the same settings, and no run.
        return copy.copy(self)

    # Leaving.

    def _leave(self, reason: str, departure: Departure | None) -> None:
        """The checkpoint is durable (or cannot be): end the program, or the `fit`."""
        self.preempted = reason
        _forget(self._run)
        end_program(departure, self._settings.exit_fn)
        self._stop_fit()

    def _stop_fit(self) -> None:
        """Let `fit` return, without showing the others an epoch that is not whole."""
        self.model.stop_training = True
        self.model.stop_evaluating = True
        found = find_fit().callback_list
        if found is not None and self._run is not None:
            self._hidden = (found, found.callbacks)
            found.callbacks = [self]

    def _show_others(self) -> None:
        hidden, self._hidden = self._hidden, None
        if hidden is not None:
            hidden[0].callbacks = hidden[1]

    def _take_place(self) -> None:
        """Be the last in the list, after History, with a herald at its head."""
        callback_list = find_fit().callback_list
        if callback_list is None or self not in callback_list.callbacks:
            return
        others = [one for one in callback_list.callbacks if isinstance(one, type(self))]
        if len(others) > 1:
            raise ValueError(
                "Expected one PreemptionAwareCallback in the list of callbacks. "
                f"Received: {len(others)}"
            )
        others = [one for one in callback_list.callbacks if not _is_placed(one, self)]
        herald = _Herald(self, callback_list)
        herald.set_model(self.model)
        callback_list.callbacks = [herald, *others, self]


def _forget(run: PreemptionRun | None) -> None:
    if run in _open_runs:
        _open_runs.remove(run)


class _Herald(_Callback):  # type: ignore[misc]
    """Hears everything first, and passes it on to the callback, which hears it last."""

    belongs_to_preemption = True

    def __init__(self, owner: PreemptionAwareCallback, callback_list: Any) -> None:
        super().__init__()
        self.owner = owner
        self._list = callback_list

    def on_train_begin(self, logs: Any = None) -> None:
        self.owner.open_run()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.owner.epoch_comes()

    def on_test_begin(self, logs: Any = None) -> None:
        self.owner.validation_begins(self._list)

    def on_train_end(self, logs: Any = None) -> None:
        self.owner.training_ends()


def _is_placed(one: Any, owner: PreemptionAwareCallback) -> bool:
    return one is owner or (isinstance(one, _Herald) and one.owner is owner)
