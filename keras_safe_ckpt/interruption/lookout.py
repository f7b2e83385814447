"""Watches for notices during one run, and has all workers act on them after the same step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FrameType

from keras_safe_ckpt.cluster.agreement import Request, agreement_in
from keras_safe_ckpt.cluster.cohort import Cohort
from keras_safe_ckpt.errors import AgreementError
from keras_safe_ckpt.preemption.choosing import Choice
from keras_safe_ckpt.preemption.desk import SAVE, STOP, WITHDRAW, NoticeDesk
from keras_safe_ckpt.preemption.leaving import Departure
from keras_safe_ckpt.preemption.notices import Notice, Watcher
from keras_safe_ckpt.preemption.pace import Pace
from keras_safe_ckpt.preemption.signals import SignalWatcher

_log = logging.getLogger(__name__)


class Lookout:
    """From `start` to `close`; in between `after_step` says what is due."""

    def __init__(
        self,
        choice: Choice,
        cohort: Cohort,
        pace: Pace,
        *,
        grace_seconds: float | None,
        is_wanted: Callable[[FrameType | None], bool],
        on_notice: Callable[[Notice], None],
        name: str = "preemption",
        waits_for_end: bool = False,
    ) -> None:
        self._agreement = agreement_in(cohort, name)
        self._task = cohort.task
        # Whether what comes when the others have ended is acted on later, at the end here.
        self._waits_for_end = waits_for_end
        self._signals = SignalWatcher(
            choice.signals, seconds=choice.seconds_after, is_wanted=is_wanted
        )
        self._watchers: list[Watcher] = [self._signals, *choice.pollers()]
        self._started: list[Watcher] = []
        self.desk = NoticeDesk(
            pace,
            ask=self._ask,
            on_notice=on_notice,
            unanswered=self._unanswered,
            grace_seconds=grace_seconds,
        )

    def start(self) -> None:
        for watcher in self._watchers:
            self._started.append(watcher)
            watcher.start(self.desk)

    @property
    def expects(self) -> bool:
        """Whether all are about to agree on something."""
        return self._agreement.expects

    def is_pressed(self) -> bool:
        """Whether a notice holds here; of one that another worker has, `at_end` tells."""
        self._signals.report()
        return self.desk.pressing is not None

    def after_step(self) -> tuple[Request, ...]:
        """What is due now; `AgreementError` if a worker does not answer."""
        if self._signals.unreported:
            self._signals.report()
        due = self._agreement.after_step()
        return self._learn_from(due) if due else due

    def at_end(self) -> tuple[Request, ...]:
        """What is due since there are no more steps.

        A notice that left time to train on is due now: what comes after training may take longer
        than there is, and must find what was trained.
        """
        self._signals.report()
        pressing = self.desk.pressing
        if pressing is not None:
            self._ask(STOP, f"{pressing.source}: {pressing.reason}", pressing.seconds_left())
        return self._learn_from(self._agreement.at_end())

    def ask_for_save(self, reason: str) -> None:
        """Of all workers, after the same step."""
        self._ask(SAVE, reason, None)

    def answered(self) -> None:
        """Training stops: no signal is left without an effect."""
        self.desk.close()
        self._signals.answered()

    def departure(self, code: int | None) -> Departure | None:
        """The way out of the program with ``code``, if any; it has the signals from now on.

        There is no gap in between, in which a signal could end the program in another way.
        """
        if code is None:
            return None
        departure = Departure(code)
        departure.former = self._signals.hand_over(departure.on_signal)
        return departure

    def close(self) -> None:
        """Stop watching; signals have the effect again that they had before."""
        self.desk.close()
        for watcher in self._started:
            watcher.stop()
        self._started.clear()
        self._agreement.close()

    def _learn_from(self, due: tuple[Request, ...]) -> tuple[Request, ...]:
        """What the others know of their ends; returns what is to be done."""
        for request in due:
            source = f"{request.task}, {request.reason}"
            if request.purpose == WITHDRAW:
                self.desk.forget(source)
            elif request.deadline is not None and request.task != self._task:
                self.desk.learn(Notice(source, "a notice", request.deadline))
        return tuple(request for request in due if request.purpose != WITHDRAW)

    def _ask(self, purpose: str, reason: str, seconds_left: float | None) -> bool:
        try:
            heard = self._agreement.request(purpose, reason, seconds_left=seconds_left)
            return heard or self._waits_for_end
        except AgreementError as gone:
            # Whoever carries the agreement has died, and the next step will say so.
            _log.warning("The workers cannot be asked to %s: %s", purpose, gone)
            return True

    def _unanswered(self, notice: Notice) -> None:
        _log.error("Nobody has stopped training: %s", notice)
        self._signals.fall_through()


def stops(due: tuple[Request, ...]) -> Request | None:
    """The request to stop among those that are due."""
    return next((request for request in due if request.purpose == STOP), None)


def ends_run(due: tuple[Request, ...]) -> Request | None:
    """At the end of training also one to save, if it has a deadline: no other save will come."""
    real = (request for request in due if request.deadline is not None)
    return stops(due) or next(real, None)
