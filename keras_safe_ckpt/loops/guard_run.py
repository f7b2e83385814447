"""The life of a `PreemptionGuard`: from its making to a notice, or to the end of the loop."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from keras_safe_ckpt.cluster.agreement import Request
from keras_safe_ckpt.cluster.cohort import Cohort, open_cohort
from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.errors import AgreementError, ClusterConfigError
from keras_safe_ckpt.interruption.ending import Ending, end_program
from keras_safe_ckpt.interruption.lookout import Lookout, ends_run, stops
from keras_safe_ckpt.interruption.report import Report
from keras_safe_ckpt.loops.guard_save import GuardSave
from keras_safe_ckpt.loops.guarded_state import GuardedState
from keras_safe_ckpt.preemption.leaving import stay
from keras_safe_ckpt.preemption.notices import Notice
from keras_safe_ckpt.preemption.pace import Pace
from keras_safe_ckpt.preemption.signals import end_now
from keras_safe_ckpt.storage.writer import wait_for_all_writers

_log = logging.getLogger(__name__)

#: Notices that came when a loop had failed, for the case that it is tried again.
_unanswered: list[Notice] = []


class GuardRun:
    """Boundaries are where nothing is half done: between two steps, or after the last one.

    All workers that train together come to the same boundaries in the same order.
    """

    def __init__(self, ending: Ending, role: Role, state: GuardedState) -> None:
        stay()  # Whoever trains again does not leave.
        self._ending = ending
        self._role = role
        self._state = state
        self._cohort = _cohort(role)
        self._pace = Pace()
        self._report = Report(state.events, role, verbose=ending.verbose > 0)
        self._last_save = GuardSave(state, role, self._cohort, self._pace)
        self._put_back: Callable[[], None] | None = None
        self._since: float | None = None
        #: Why it has ended the loop; None if it has not.
        self.preempted: str | None = None
        self.is_over = False
        #: A step has failed: nobody knows what is half done.
        self._is_torn = False
        self._is_followed = False
        #: How many runs were made, those before a restart included.
        self.runs = self._restored()
        if self.runs:
            self._report.note("resume", runs=self.runs)
            self._report.say(f"Going on after {self.runs} runs")
        self._report.note("begin", runs=self.runs, **self._report.who, notices=str(ending.choice))
        self._lookout = Lookout(
            ending.choice,
            self._cohort,
            self._pace,
            grace_seconds=ending.grace_period,
            is_wanted=lambda frame: True,
            on_notice=self._report.notice,
            name="guard",
            waits_for_end=True,
        )
        self._lookout.start()
        while _unanswered:
            self._lookout.desk.tell(_unanswered.pop())

    def _restored(self) -> int:
        try:
            return self._state.restore(self._cohort, self._role)
        except Exception as error:
            if self._role.trains_together and not isinstance(error, AgreementError):
                self._cohort.fail(error)  # The others wait for this one.
            raise

    # Steps and what is between them.

    def step(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call it; whoever fails in it takes the others along."""
        began = time.perf_counter()
        with self.guarding():
            result = function(*args, **kwargs)
        self._is_torn = False
        self.runs += 1
        self._pace.batch_took(time.perf_counter() - began)
        self._follow()
        return result

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """What fails in here ends the other workers, too. The end of the data is no failure."""
        if self.is_over:
            yield
            return
        end_of_data: BaseException | None = None
        together = self._role.trains_together
        try:
            with self._cohort.guarding() if together else contextlib.nullcontext():
                try:
                    yield
                except BaseException as error:
                    if not is_end_of_data(error):
                        self._is_torn = True
                        raise
                    end_of_data = error
        except AgreementError as gone:
            self._lost(gone)
            raise
        if end_of_data is not None:
            raise end_of_data

    def _lost(self, gone: AgreementError) -> None:
        """Another worker is, in the middle of a step: if all were about to stop, leave."""
        if self.is_over:
            return
        if self._put_back is not None:
            self._put_back()  # What there was before this step can be saved.
            self._stop_alone(gone)
        elif self._lookout.is_pressed():
            self._lookout.answered()
            outcome = f"not saved, in the middle of a step: {gone.reason}"
            self._leave(gone.reason, self._role.task, outcome, time.perf_counter())

    def _follow(self) -> None:
        if not self._is_followed:
            self._is_followed = True
            self._state.follow(lambda: self.runs)

    def counts(self) -> None:
        """A step was made elsewhere, since the last boundary."""
        self.runs += 1
        self._is_torn = False
        self._follow()
        if self._since is not None:
            self._pace.batch_took(time.perf_counter() - self._since)

    def boundary(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        """Act on what is due here. ``args`` and ``kwargs`` are for the save, if there is one."""
        if self.is_over:
            return
        self._is_torn = False  # Whoever goes on after an error has seen to it.
        self._put_back = self._state.hold() if self._lookout.expects else None
        try:
            due = self._lookout.after_step()
        except AgreementError as gone:
            self._stop_alone(gone)
            raise
        if due:
            request = stops(due)
            if request is None:
                self._save(due[0], args, kwargs or {})
            else:
                self._stop(request, args, kwargs or {})
        self._since = time.perf_counter()

    # The end.

    def end(self) -> None:
        """The loop has come to its end: what all were to stop for is due now."""
        if self.is_over:
            return
        if self._is_torn:
            self.give_up()
            return
        try:
            last = self._last_request()
        except AgreementError as gone:
            if self._lookout.is_pressed():
                self._stop_alone(gone)
            raise
        if last is not None:
            self._stop(last, (), {})
        elif self._lookout.is_pressed():
            self._stop_alone(AgreementError([], "the others have ended before"))
        self._finish()

    def end_with_program(self) -> None:
        """The program ends by itself, in time: there is nothing to start again."""
        if self._is_torn:
            self.give_up()
        elif not self.is_over:
            self._save_at_end()
            self._lookout.answered()
            self._finish()

    def let_go(self) -> None:
        """Nobody has this guard any more, and the program goes on: the loop has ended.

        From where this is called nothing can be raised: a notice ends the program here.
        """
        if self.is_over:
            return
        if self._is_torn:
            self.give_up()
            return
        # Together with the others, whoever of them has the notice.
        concerned = self._role.trains_together or self._lookout.is_pressed()
        if concerned and threading.current_thread() is threading.main_thread():
            if self._save_at_end() and self._ending.exits:
                wait_for_all_writers()
                end_now(self._ending.exit_code)
            self._lookout.answered()
        self._finish()

    def fail(self, error: BaseException) -> None:
        """The loop ends by an error: nobody knows what is half done, and nothing is saved."""
        if self.is_over:
            return
        if isinstance(error, Exception) and self._role.trains_together:
            self._cohort.fail(error)
        self.give_up()

    def give_up(self) -> None:
        """The loop has ended by an error, which is what everybody is to see."""
        if self.is_over:
            return
        self._is_torn = True
        if self._lookout.is_pressed():
            _log.warning("The loop has failed before a notice could be acted on: nothing saved.")
            self._lookout.answered()
            # Should it be tried again, the next guard hears of it.
            _unanswered.extend(filter(None, [self._lookout.desk.pressing]))
        self.close()

    def _finish(self) -> None:
        if not self.is_over:
            self._report.note("finished", runs=self.runs)
            self.close()

    def close(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._state.ended(None if self._is_torn else self.runs)
            self._lookout.close()
            self._cohort.close()

    def _last_request(self) -> Request | None:
        return ends_run(self._lookout.at_end())

    def _save_at_end(self) -> bool:
        """Whether there was reason to."""
        try:
            last = self._last_request()
            if last is not None:
                self._save(last, (), {})
                return True
            if self._lookout.is_pressed():
                raise AgreementError([], "the others have ended before")
            return False
        except AgreementError as gone:
            if not self._lookout.is_pressed():
                _log.debug("The others have ended before: %s", gone)
                return False
            outcome = self._last_save.alone(self.runs, gone, self._lookout.desk.seconds_left())
            self._report.note("backup", runs=self.runs, reason=gone.reason, outcome=outcome)
            self._report.say(f"After {self.runs} runs: {outcome}")
            return True

    def _save(self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """And go on. If it fails, the last one will be tried at the end."""
        began = time.perf_counter()
        outcome = self._last_save.together(self.runs, args, kwargs, self._seconds_left(request))
        seconds = time.perf_counter() - began
        self._report.note("backup", runs=self.runs, reason=request.reason, outcome=outcome)
        self._report.say(f"After {self.runs} runs: {outcome} ({request.reason}; {seconds:.2f} s)")

    def _stop(self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._lookout.answered()
        began = time.perf_counter()
        waited = time.monotonic() - request.heard
        facts = {"reason": request.reason, "task": request.task}
        self._report.note("agreement", runs=self.runs, seconds=waited, **facts)
        self._report.say(
            f"Stopping after {self.runs} runs ({request.reason}, {request.task}; "
            f"{waited:.2f} s ago)"
        )
        outcome = self._last_save.together(self.runs, args, kwargs, self._seconds_left(request))
        self._leave(request.reason, request.task, outcome, began)

    def _stop_alone(self, gone: AgreementError) -> None:
        self._lookout.answered()
        began = time.perf_counter()
        self._report.say(f"Stopping after {self.runs} runs: {gone.reason}")
        outcome = self._last_save.alone(self.runs, gone, self._lookout.desk.seconds_left())
        self._leave(gone.reason, self._role.task, outcome, began, degraded=True)

    def _leave(
        self, reason: str, task: str, outcome: str, began: float, *, degraded: bool = False
    ) -> None:
        seconds, ending = time.perf_counter() - began, self._ending.describe("the loop goes on")
        self._report.note(
            "preempted",
            runs=self.runs,
            reason=reason,
            task=task,
            outcome=outcome,
            ending=ending,
            degraded=degraded,
            seconds=seconds,
        )
        self._report.say(f"{outcome[0].upper()}{outcome[1:]} ({seconds:.2f} s); {ending}")
        departure = self._lookout.departure(self._ending.departure_code)
        self.preempted = reason
        self.close()
        end_program(departure, self._ending.exit_fn)

    def _seconds_left(self, request: Request) -> float | None:
        ends = (self._lookout.desk.seconds_left(), request.seconds_left())
        return min((seconds for seconds in ends if seconds is not None), default=None)


def last_error() -> BaseException | None:
    """By which the interpreter ends, if it does: then nobody knows what is half done."""
    return getattr(sys, "last_value", None)


def is_end_of_data(error: BaseException) -> bool:
    """For all workers at the same step, and no failure."""
    if isinstance(error, (StopIteration, GeneratorExit)):
        return True
    errors = getattr(sys.modules.get("tensorflow"), "errors", None)
    return errors is not None and isinstance(error, errors.OutOfRangeError)


def _cohort(role: Role) -> Cohort:
    cohort = open_cohort(role)
    if cohort is None:
        raise ClusterConfigError(
            "cluster_resolver", "its workers have no way to agree when to stop"
        )
    return cohort
