"""Where notices arrive: what to ask the training for, and when."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from keras_safe_ckpt.preemption.notices import Notice
from keras_safe_ckpt.preemption.pace import Pace

_log = logging.getLogger(__name__)

#: What all workers are asked to do after the same step. What was asked for may be withdrawn.
STOP, SAVE, WITHDRAW = "stop", "save", "withdraw"


class NoticeDesk:
    """Turns notices into requests: stop at once, or save now and stop in time.

    ``ask(purpose, reason, seconds_left)`` requests something of all workers, and says whether
    anybody trains that could do it. ``unanswered(notice)`` is called when nobody has stopped by
    the deadline. ``grace_seconds`` replaces the deadline of every notice; 0 is what it is for
    TensorFlow: stop at once, there is no telling how long there is.
    """

    def __init__(
        self,
        pace: Pace,
        *,
        ask: Callable[[str, str, float | None], bool],
        on_notice: Callable[[Notice], None],
        unanswered: Callable[[Notice], None],
        grace_seconds: float | None = None,
    ) -> None:
        self._pace = pace
        self._ask = ask
        self._on_notice = on_notice
        self._unanswered = unanswered
        self._grace = grace_seconds
        self._turn = threading.RLock()
        self._notices: dict[str, Notice] = {}
        self._stop_timers: dict[str, threading.Timer] = {}
        self._deadline_timers: dict[str, threading.Timer] = {}
        self._asked_to_stop = False
        self._over = False

    @property
    def pressing(self) -> Notice | None:
        """The notice with the earliest end that holds now; advisory ones do not count."""
        with self._turn:
            real = [notice for notice in self._notices.values() if not notice.advisory]
        return min(real, key=lambda n: n.received if n.deadline is None else n.deadline,
                   default=None)  # fmt: skip

    def seconds_left(self) -> float | None:
        """Until the earliest end that is known."""
        pressing = self.pressing
        return None if pressing is None else pressing.seconds_left()

    def tell(self, notice: Notice) -> None:
        if self._grace is not None and not notice.advisory:
            deadline = notice.received + self._grace if self._grace else None
            notice = replace(notice, deadline=deadline)
        with self._turn:
            if self._over:
                return
            self._cancel(notice.source)
            self._notices[notice.source] = notice
        self._decide(notice)
        try:
            # Afterwards: a log on a slow disk, or a closed terminal, must not keep it from anybody.
            self._on_notice(notice)
        except Exception:  # noqa: BLE001  # as above
            _log.exception("The notice could not be shown: %s", notice)

    def _decide(self, notice: Notice) -> None:
        left = notice.seconds_left()
        if notice.advisory:
            self._request(SAVE, notice)
            return
        if left is not None:
            self._arm(self._deadline_timers, notice.source, left, lambda: self._too_late(notice))
        seconds = self._pace.seconds_to_train(left)
        if seconds <= 0:
            self._stop(notice)
            return
        # First of all something to go on from, since the end may come early.
        self._request(SAVE, notice)
        self._arm(self._stop_timers, notice.source, seconds, lambda: self._stop(notice))

    def learn(self, notice: Notice) -> None:
        """Another worker has it, and has asked for a save: plan for its end here as well.

        Whoever writes knows best how long that takes, and the first to ask all to stop is heard.
        """
        with self._turn:
            if self._over:
                return
            self._cancel(notice.source)
            self._notices[notice.source] = notice
        seconds = self._pace.seconds_to_train(notice.seconds_left())
        self._arm(self._stop_timers, notice.source, seconds, lambda: self._stop(notice))

    def withdraw(self, source: str) -> None:
        """The end does not come; if training was not asked to stop yet, it goes on."""
        notice = self.forget(source)
        if notice is not None and not notice.advisory:
            _log.warning("The notice was withdrawn: %s", notice)
            self._request(WITHDRAW, notice)

    def forget(self, source: str) -> Notice | None:
        """What this source has said does not hold any more; returns what it was."""
        with self._turn:
            self._cancel(source)
            return self._notices.pop(source, None)

    def close(self) -> None:
        """Training has ended, or has come to where it stops: nothing is to be asked for."""
        with self._turn:
            self._over = True
            for source in list(self._notices):
                self._cancel(source)

    def _stop(self, notice: Notice) -> None:
        with self._turn:
            if self._asked_to_stop or self._over:
                return
            self._asked_to_stop = True
        if not self._request(STOP, notice):
            self._too_late(notice)

    def _request(self, purpose: str, notice: Notice) -> bool:
        left = None if notice.advisory else notice.seconds_left()
        return self._ask(purpose, f"{notice.source}: {notice.reason}", left)

    def _too_late(self, notice: Notice) -> None:
        with self._turn:
            if self._over or notice.source not in self._notices:
                return
        self._unanswered(notice)

    def _arm(
        self,
        timers: dict[str, threading.Timer],
        source: str,
        seconds: float,
        action: Callable[[], None],
    ) -> None:
        timer = threading.Timer(seconds, action)
        timer.name = "keras_safe_ckpt-notice-timer"
        timer.daemon = True
        with self._turn:
            if not self._over:
                timers[source] = timer
                timer.start()

    def _cancel(self, source: str) -> None:
        for timers in (self._stop_timers, self._deadline_timers):
            timer = timers.pop(source, None)
            if timer is not None:
                timer.cancel()
