"""One run of `fit` with a `PreemptionAwareCallback`: where it is, and what is due there."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from keras_safe_ckpt.callbacks.last_save import LastSave
from keras_safe_ckpt.callbacks.preemption_settings import Settings
from keras_safe_ckpt.callbacks.resuming import Resuming
from keras_safe_ckpt.callbacks.run_backups import RunBackups
from keras_safe_ckpt.callbacks.run_directory import RunDirectory
from keras_safe_ckpt.callbacks.run_end import RunEnd
from keras_safe_ckpt.callbacks.run_facts import facts_of, finished_here, what_cannot_hold
from keras_safe_ckpt.callbacks.run_report import RunReport
from keras_safe_ckpt.callbacks.run_saver import RunSaver
from keras_safe_ckpt.callbacks.scalars import scalars_for
from keras_safe_ckpt.cluster.agreement import Request
from keras_safe_ckpt.cluster.membership import Membership
from keras_safe_ckpt.cluster.roles import role_of
from keras_safe_ckpt.errors import AgreementError
from keras_safe_ckpt.interruption.lookout import Lookout, ends_run, stops
from keras_safe_ckpt.preemption.leaving import Departure
from keras_safe_ckpt.preemption.pace import Pace
from keras_safe_ckpt.storage.keras_internals import import_keras
from keras_safe_ckpt.training.keras_fit import FitAround, find_fit, is_running
from keras_safe_ckpt.training.position import Position, Progress
from keras_safe_ckpt.training.progress_mark import ProgressMark
from keras_safe_ckpt.training.run_state import Captured, RunState

_log = logging.getLogger(__name__)

_MARK = ".run-progress"
#: How long the workers wait for each other at the end of training.
_END_SECONDS = 3600.0


class PreemptionRun:
    """Begins when `fit` does. ``leave`` is called when it is to end by a notice: why, and how."""

    def __init__(
        self,
        callback: Any,
        settings: Settings,
        leave: Callable[[str, Departure | None], None],
    ) -> None:
        backend = import_keras().backend.backend()
        if backend != "tensorflow":
            raise ValueError(
                "PreemptionAwareCallback needs Keras's TensorFlow backend. "
                f"Received: backend {backend!r}"
            )
        self._thread = threading.current_thread()
        self._fit = FitAround()
        self._callback = callback
        self._model = callback.model
        self._params: Mapping[str, Any] = callback.params or {}
        self._settings = settings
        self._leave = leave
        self._pace = Pace()
        self._closing = contextlib.ExitStack()
        self._is_over = False
        self._progress = Progress(self._model)
        self._last_end: float | None = None
        # What can be saved at any moment, where the model itself is not fit to be captured.
        self._held: Captured | None = None
        self._in_validation = False
        self._put_off: tuple[Request, ...] = ()
        self._is_tried_out = False

    # Beginning: `open` before the other callbacks hear of it, `begin` after.

    def open(self) -> None:
        """Find everything that can be wrong, and load, before anything else has changed."""
        self._fit = find_fit()
        self._role = role_of(self._model)
        self._membership = Membership(self._role)
        self._closing.callback(self._membership.close)
        with self._membership.others_told():
            self._open()

    def _open(self) -> None:
        settings = self._settings
        place = RunDirectory(
            settings.directory,
            self._role,
            self._membership,
            locks=settings.locks,
            max_to_keep=settings.max_to_keep,
        )
        self._closing.callback(place.close)
        self._cohort = place.cohort
        self._backups = place.backups
        events = place.backups.store.events
        name = place.backups.directory.name
        events.listener = scalars_for(self._model, settings.log_dir, self._role, name)
        self._report = RunReport(events, self._role, verbose=settings.verbose > 0)
        self._mark = ProgressMark(place.backups.directory / _MARK)
        self._closing.callback(self._mark.close)
        if self._fit.callback_list is None:
            _log.warning(
                "The list of callbacks was not found in this version of Keras: the state of the "
                "others (EarlyStopping and the like) is not kept."
            )
        others = [
            other
            for other in getattr(self._fit.callback_list, "callbacks", [])
            if not getattr(other, "belongs_to_preemption", False)
        ]
        self._life = place.life
        facts = facts_of(self._model, self._params, self._fit, self._role, place.life)
        self._history = getattr(self._model, "history", None) or import_keras().callbacks.History()
        self._state = RunState(self._model, others, self._history, facts)
        self._saver = RunSaver(self._backups, self._role, self._cohort, self._pace, place.life)
        self._regular = RunBackups(
            settings, self._saver, self._pace, self._report, leads=self._role.leads
        )
        self._resuming = Resuming(
            self._model,
            self._fit,
            self._state,
            self._backups,
            role=self._role,
            cohort=self._cohort,
            restore=settings.restore if settings.writes else False,
            makes_backups=settings.makes_backups,
            facts=facts,
            reached=self._mark.read(),
            say=self._report.say,
        )
        self._closing.callback(self._resuming.close)
        self._resuming.open()

    def begin(self) -> None:
        """The others are ready: put everything where it was, and watch from now on."""
        with self._membership.others_told():
            self._lookout = Lookout(
                self._settings.choice,
                self._cohort,
                self._pace,
                grace_seconds=self._settings.grace_period,
                is_wanted=lambda frame: is_running(self._fit, frame),
                on_notice=self._report.notice,
            )
            self._closing.callback(self._lookout.close)
            self._end = RunEnd(
                self._settings,
                self._lookout,
                LastSave(self._settings, self._role, self._cohort, self._saver, self._pace),
                self._report,
                close=self._close_with_cohort,
                leave=self._leave,
            )
            # The way back may be long.
            self._lookout.start()
            at = self._resuming.begin(self._history, self._callback, self._check_at_once)
            self._progress.begin(at)
            if self._role.leads and self._settings.writes:
                self._mark.open()
                self._mark.write(self._progress.total)
            self._regular.begin(at)
            self._state.callbacks.begin_watching()
            if self._settings.writes:
                for reason in what_cannot_hold(self._model, self._fit):
                    warnings.warn(reason, stacklevel=2)
            if self._role.trains_together:
                self._guard_steps()
            self._report.begin(at, self._params, str(self._settings.choice))

    # Boundaries, as Keras reports them.

    def epoch_comes(self) -> None:
        """Before any callback hears of it, and may fail: a later `fit` begins where it is told."""
        self._resuming.forget_epoch()

    def batch_begins(self) -> None:
        self._resuming.batch_begins()

    def epoch_begins(self, epoch: int) -> None:
        self._last_end = None
        self._held = None
        self._progress.epoch_begins(epoch, anew=not self._resuming.epoch_begins())
        self._state.epoch_begins()

    def batch_ends(self, batch: int, logs: Mapping[str, Any]) -> None:
        if self._resuming.is_fast_forwarding():
            self._check_on_the_way()
            return
        self._progress.batch_ends(batch, logs)
        self._mark.write(self._progress.total)
        if self._last_end is not None:
            self._pace.batch_took(time.perf_counter() - self._last_end)
        # Whatever happens to the others until all have agreed: this can be saved.
        self._held = self._capture() if self._lookout.expects else None
        self._try_out_capture()
        due = self._after_step()
        if due and self._act(due):
            return
        reason = self._regular.reason_by_clock(batch)
        if reason is not None:
            self._lookout.ask_for_save(reason)
            due = () if self._role.trains_together else self._after_step()
            if due and self._act(due):
                return
        if self._regular.is_due_after_batch(batch):
            self._back_up()
        self._saver.poll()
        self._last_end = time.perf_counter()

    def validation_begins(self, callback_list: Any) -> None:
        """Before anybody prepares for it: this is what an interrupted validation goes back to.

        Not of an evaluation that a callback makes by itself, which may come in mid-epoch.
        """
        if callback_list is self._fit.callback_list and not self._is_over:
            self._in_validation = True
            self._resuming.batches_end()
            self._held = self._capture(replace(self._progress.now(), trained=True))

    def test_batch_ends(self) -> None:
        """Also of a prediction that a callback makes: saved is where training was before."""
        if self._is_over:
            return
        due = self._after_step()
        if due and self._held is None:
            self._put_off += due  # To the end of the epoch, where it is known what to save.
        elif due:
            self._act(due)

    def validation_ends(self) -> None:
        self._in_validation = False

    def epoch_ends(self, epoch: int) -> None:
        self._held = None
        if self._is_over:
            return
        self._resuming.batches_end()
        self._progress.epoch_ends(epoch)
        due, self._put_off = self._put_off, ()
        if due and self._act(due):
            return
        if self._regular.is_due_after_epoch():
            self._back_up()
        self._saver.poll()

    def training_ends(self) -> None:
        """Before the others change something: what a run that is to end once more goes back to."""
        if not self._is_over:
            self._progress.training_ends()
            self._held = self._capture()

    def train_ends(self) -> None:
        """Training is finished, unless a notice has come meanwhile."""
        if self._is_over:
            return
        if self._held is None:
            self.training_ends()
        due = self._lookout.at_end()
        last = ends_run(due)
        if last is not None:
            self._stop(last)
            return
        if due:
            self._act(due)
        error: Exception | None = None
        try:
            self._finish()
        except Exception as failed:  # noqa: BLE001  # not swallowed: the barrier raises it
            error = failed
        self._membership.finish("PreemptionAwareCallback", error, _END_SECONDS)
        if self._settings.writes and self._settings.delete_checkpoint and self._role.leads:
            self._backups.delete_all(self._role.world)
        self._report.finished(self._progress.now().epoch)
        self.close()

    def is_running(self) -> bool:
        """Whether its `fit` is going on, on this thread or another one."""
        return is_running(self._fit, sys._current_frames().get(self._thread.ident or 0))

    def close(self) -> None:
        """Whatever happens next is not this run's business."""
        self._is_over = True
        self._closing.close()

    def _close_with_cohort(self) -> None:
        """All go, each by itself: that is not a failure to tell the others of."""
        self.close()
        self._cohort.close()

    # What is due.

    def _after_step(self) -> tuple[Request, ...]:
        try:
            return self._lookout.after_step()
        except AgreementError as gone:
            if not self._in_validation:
                self._held = self._held or self._capture()
            self._stop_alone(gone)
            raise

    def _act(self, due: tuple[Request, ...]) -> bool:
        """Whether the run is over now."""
        request = stops(due)
        if request is None:
            self._back_up(due[0].reason)
            return False
        self._stop(request)
        return True

    def _check_at_once(self) -> None:
        """On the way through epochs before, where there are no steps that all could agree on."""
        if self._settings.exits and not self._role.trains_together:
            self._check_on_the_way()

    def _check_on_the_way(self) -> None:
        request = stops(self._after_step())
        if request is not None:
            self._end.on_the_way(request, self._resuming.position)

    def _back_up(self, reason: str = "backup") -> None:
        if not self._settings.writes:
            return
        self._state.callbacks.warn_of_unknown()
        with self._membership.others_told():
            left = self._lookout.desk.seconds_left()
            self._regular.save(self._place(), self._held_or_captured, reason, left)

    def _finish(self) -> None:
        self._saver.wait()
        if self._settings.writes and not self._settings.delete_checkpoint:
            self._saver.save(
                self._capture(), reason="finished", background=False, facts={"finished": True}
            )
            finished_here(self._life)

    # Stopping.

    def _stop(self, request: Request) -> None:
        if self._settings.writes:
            self._state.callbacks.warn_of_unknown()
        self._end.together(request, self._place(), self._held_or_captured)

    def _stop_alone(self, gone: AgreementError) -> None:
        if self._held is not None and self._settings.writes:
            self._end.alone(self._held, gone, self._role.task)

    def _try_out_capture(self) -> None:
        """Once, after the first batch: what cannot be captured is to be known now, not in hours."""
        if self._is_tried_out or not self._settings.writes:
            return
        self._is_tried_out = True
        self._capture()

    def _guard_steps(self) -> None:
        """A step may fail since a worker died while all were agreeing: then save what is held."""
        own = self._model.train_function

        def step(iterator: Any) -> Any:
            try:
                return own(iterator)
            except StopIteration:
                raise
            except Exception as error:
                if self._held is not None and self._lookout.expects:
                    first_line = str(error).partition("\n")[0]
                    self._stop_alone(AgreementError([], f"a step failed ({first_line})"))
                raise

        self._model.train_function = step
        self._closing.callback(setattr, self._model, "train_function", own)

    # Facts.

    def _place(self) -> Position:
        """Of what would be saved now."""
        return self._progress.now() if self._held is None else self._held.position

    def _held_or_captured(self) -> Captured:
        return self._capture() if self._held is None else self._held

    def _capture(self, position: Position | None = None) -> Captured:
        own = self._role.trains_together and not self._role.chief
        at = self._progress.now() if position is None else position
        return self._state.capture(at, own_weights=own)
