"""Backups of a run, for what comes without notice: when one is due, and when it is too late."""

from __future__ import annotations

from collections.abc import Callable

from keras_safe_ckpt.callbacks.last_save import too_late
from keras_safe_ckpt.callbacks.preemption_settings import Settings
from keras_safe_ckpt.callbacks.run_report import RunReport
from keras_safe_ckpt.callbacks.run_saver import RunSaver
from keras_safe_ckpt.preemption.pace import Pace
from keras_safe_ckpt.training.cadence import Cadence, EveryBatches, EveryEpoch, EverySeconds
from keras_safe_ckpt.training.position import Position
from keras_safe_ckpt.training.run_state import Captured


class RunBackups:
    """``leads``: this worker writes the checkpoint, to which others only add."""

    def __init__(
        self, settings: Settings, saver: RunSaver, pace: Pace, report: RunReport, *, leads: bool
    ) -> None:
        self._settings = settings
        self._saver = saver
        self._pace = pace
        self._report = report
        self._leads = leads
        self._cadence: Cadence | None = None
        self._clock: EverySeconds | None = None
        self._said_too_late = False

    def begin(self, at: Position) -> None:
        """Count from here."""
        if not self._settings.writes:
            return
        freq, seconds = self._settings.save_freq, self._settings.save_every_seconds
        if freq == "epoch":
            self._cadence = EveryEpoch()
        elif freq is not None:
            self._cadence = EveryBatches(int(freq), last=at.batch - 1)
        if seconds is not None:
            self._clock = EverySeconds(seconds)

    def is_due_after_batch(self, batch: int) -> bool:
        return self._cadence is not None and self._cadence.after_batch(batch)

    def is_due_after_epoch(self) -> bool:
        return self._cadence is not None and self._cadence.after_epoch()

    def reason_by_clock(self, batch: int) -> str | None:
        """Why all workers are to save after the same batch, if the time has come."""
        if self._clock is None or not self._leads or not self._clock.after_batch(batch):
            return None
        return f"{self._settings.save_every_seconds:g} s have passed"

    def save(
        self,
        at: Position,
        capture: Callable[[], Captured],
        reason: str,
        seconds_left: float | None,
    ) -> None:
        """In the background, unless it is there already or could not be finished in time."""
        if self._clock is not None:
            self._clock.saved()
        if self._saver.is_saved(at) or not self._is_in_time(seconds_left):
            return
        self._saver.wait()  # Memory holds one capture at a time.
        captured = capture()
        self._saver.save(captured, reason=reason, background=True)
        self._report.record(
            "backup", at, step=captured.step, reason=reason, seconds=captured.seconds
        )
        self._report.say(
            f"Saving {at} in the background ({reason}; training waited "
            f"{1e3 * captured.seconds:.1f} ms)"
        )

    def _is_in_time(self, seconds_left: float | None) -> bool:
        """Whoever writes the checkpoint decides; without it, the parts of others do not count."""
        if not self._leads or self._pace.can_save(seconds_left):
            return True
        if not self._said_too_late:
            self._said_too_late = True
            self._report.say(f"No more backups: {too_late(seconds_left, self._pace)}")
        return False
