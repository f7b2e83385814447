"""The end of a run by a notice: the last save, and the way out of `fit`."""

from __future__ import annotations

import time
from collections.abc import Callable

from keras_safe_ckpt.callbacks.last_save import LastSave
from keras_safe_ckpt.callbacks.preemption_settings import Settings
from keras_safe_ckpt.callbacks.run_report import RunReport
from keras_safe_ckpt.cluster.agreement import Request
from keras_safe_ckpt.errors import AgreementError
from keras_safe_ckpt.interruption.lookout import Lookout
from keras_safe_ckpt.preemption.leaving import Departure
from keras_safe_ckpt.training.position import Position
from keras_safe_ckpt.training.run_state import Captured


class RunEnd:
    """``close`` lets go of the run; ``leave`` ends the program or the `fit`: why, and how."""

    def __init__(
        self,
        settings: Settings,
        lookout: Lookout,
        last_save: LastSave,
        report: RunReport,
        *,
        close: Callable[[], None],
        leave: Callable[[str, Departure | None], None],
    ) -> None:
        self._settings = settings
        self._lookout = lookout
        self._last_save = last_save
        self._report = report
        self._close = close
        self._leave = leave

    def together(self, request: Request, at: Position, capture: Callable[[], Captured]) -> None:
        """All workers do this at the same place."""
        self._lookout.answered()
        began = time.perf_counter()
        waited = time.monotonic() - request.heard
        self._report.record(
            "agreement", at, reason=request.reason, task=request.task, seconds=waited
        )
        self._report.say(
            f"Stopping after {at} ({request.reason}, {request.task}; {waited:.2f} s ago)"
        )
        ends = (self._lookout.desk.seconds_left(), request.seconds_left())
        left = min((seconds for seconds in ends if seconds is not None), default=None)
        outcome = self._last_save.together(capture, request.reason, left)
        self._end(request, at, outcome, began)

    def alone(self, captured: Captured, gone: AgreementError, task: str) -> None:
        """Somebody is missing, and all were about to stop or to save: save, and do not wait."""
        self._lookout.answered()
        began = time.perf_counter()
        self._report.say(f"Stopping after {captured.position}: {gone.reason}")
        outcome = self._last_save.alone(captured, gone)
        self._end(Request("stop", gone.reason, task), captured.position, outcome, began)

    def on_the_way(self, request: Request, to: Position) -> None:
        """Before the place is reached nothing is new: the checkpoint it came from still stands."""
        self._lookout.answered()
        self._end(request, to, "nothing new to save", time.perf_counter())

    def _end(self, request: Request, at: Position, outcome: str, began: float) -> None:
        seconds, ending = time.perf_counter() - began, self._settings.describe("fit ends")
        self._report.record(
            "preempted",
            at,
            reason=request.reason,
            task=request.task,
            outcome=outcome,
            ending=ending,
            seconds=seconds,
        )
        self._report.say(f"{outcome[0].upper()}{outcome[1:]} ({seconds:.2f} s); {ending}")
        departure = self._lookout.departure(self._settings.departure_code)
        self._close()
        self._leave(request.reason, departure)
