"""The save with which a run ends at a notice: in time, by all workers, or as well as can be."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from keras_safe_ckpt.callbacks.preemption_settings import Settings
from keras_safe_ckpt.callbacks.run_saver import RunSaver
from keras_safe_ckpt.cluster.cohort import Cohort
from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.errors import AgreementError, SafeCheckpointError
from keras_safe_ckpt.preemption.pace import Pace
from keras_safe_ckpt.training.run_state import Captured

_log = logging.getLogger(__name__)

#: How long the workers wait for each other's last save.
_MEETING_SECONDS = 600.0


class LastSave:
    """Its methods return what has come of it, in words; none of them raises.

    The machine will be gone: whatever cannot be saved now, the last backup stands, and the
    program is to be started again.
    """

    def __init__(
        self, settings: Settings, role: Role, cohort: Cohort, saver: RunSaver, pace: Pace
    ) -> None:
        self._settings = settings
        self._role = role
        self._cohort = cohort
        self._saver = saver
        self._pace = pace

    def together(
        self, capture: Callable[[], Captured], reason: str, seconds_left: float | None
    ) -> str:
        """All workers do this for the same position, and leave after all are done."""
        try:
            captured = capture()
            outcome = self._save(captured, reason, seconds_left)
            self._meet()
        except AgreementError as gone:
            if self._role.chief or not self._settings.writes or self._saver.is_committed():
                return f"saved, but the workers could not meet any more: {gone.reason}"
            return self.alone(capture(), gone)
        except Exception as error:  # noqa: BLE001  # said and recorded; see above
            _log.error("The last checkpoint could not be written: %s", error)
            with contextlib.suppress(AgreementError):
                self._meet()
            return self._not_saved(error)
        return outcome

    def alone(self, captured: Captured, gone: AgreementError) -> str:
        """Somebody is missing: what this worker has, marked as degraded."""
        others = [task for task in self._role.members if task != self._role.task]
        missing = tuple(task for task in gone.missing if task in others) or tuple(others)
        try:
            self._saver.save(
                captured, reason=f"degraded: {gone.reason}", background=False, missing=missing
            )
        except (SafeCheckpointError, OSError) as error:
            return self._not_saved(error)
        return f"saved, degraded: {gone.reason}"

    def _save(self, captured: Captured, reason: str, seconds_left: float | None) -> str:
        if self._settings.save_fn is not None:
            self._settings.save_fn()
            return "saved by save_fn"
        if self._saver.is_saved(captured.position):
            self._saver.wait()
            return "saved before"
        if not self._pace.can_save(seconds_left):
            # Half a save would be worth nothing, and one that is going on must not be disturbed.
            return self._not_saved(too_late(seconds_left, self._pace))
        self._saver.save(captured, reason=f"notice: {reason}", background=False)
        return "saved"

    def _not_saved(self, why: object) -> str:
        said = f"not saved: {str(why).rstrip('.')}"
        if not self._settings.writes:
            return said
        if self._saver.has_backup():
            return f"{said}; the last backup stands"
        return f"{said}; there is no backup, and a restart begins anew"

    def _meet(self) -> None:
        if self._role.trains_together:
            self._cohort.barrier("preempted", seconds=_MEETING_SECONDS)


def too_late(left: float | None, pace: Pace) -> str:
    """Why a save is not begun."""
    return f"{left or 0.0:.1f} s are left, and a save takes {pace.save_seconds or 0.0:.1f} s"
