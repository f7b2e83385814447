"""Watches for notices during one run, and has all workers act on them after the same step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FrameType

from keras_safe_ckpt.cluster.agreement import Request, agreement_in
from keras_safe_ckpt.cluster.cohort import Cohort
from keras_safe_ckpt.errors import AgreementError
from keras_safe_ckpt.preemption.choosing import Choice
from keras_safe_ckpt.preemption.desk import SAVE, STOP, NoticeDesk
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
    ) -> None:
        self._agreement = agreement_in(cohort, name)
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

    def after_step(self) -> tuple[Request, ...]:
        """What is due now; `AgreementError` if a worker does not answer."""
        if self._signals.unreported:
            self._signals.report()
        return self._agreement.after_step()

    def at_end(self) -> tuple[Request, ...]:
        """What is due since there are no more steps."""
        self._signals.report()
        return self._agreement.at_end()

    def ask_for_save(self, reason: str) -> None:
        """Of all workers, after the same step."""
        self._ask(SAVE, reason)

    def answered(self) -> None:
        """Training stops: no signal is left without an effect."""
        self.desk.close()
        self._signals.answered()

    def close(self) -> None:
        """Stop watching; signals have the effect again that they had before."""
        self.desk.close()
        for watcher in self._started:
            watcher.stop()
        self._started.clear()
        self._agreement.close()

    def _ask(self, purpose: str, reason: str) -> bool:
        try:
            return self._agreement.request(purpose, reason)
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
