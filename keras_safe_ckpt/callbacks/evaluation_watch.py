"""Notices during an `evaluate` or `predict` outside of `fit`: there is nothing to save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_safe_ckpt.callbacks.preemption_settings import Settings
from keras_safe_ckpt.cluster.agreement import Request
from keras_safe_ckpt.cluster.cohort import open_cohort
from keras_safe_ckpt.cluster.membership import Membership
from keras_safe_ckpt.cluster.roles import role_of
from keras_safe_ckpt.interruption.lookout import Lookout, ends_run, stops
from keras_safe_ckpt.interruption.messages import say
from keras_safe_ckpt.preemption.leaving import Departure
from keras_safe_ckpt.preemption.notices import Notice
from keras_safe_ckpt.preemption.pace import Pace
from keras_safe_ckpt.training.keras_fit import find_fit, is_running


class EvaluationWatch:
    """From the beginning of an evaluation to its end, or to the notice that ends it."""

    def __init__(
        self, model: Any, settings: Settings, leave: Callable[[str, Departure | None], None]
    ) -> None:
        role = role_of(model)
        self._membership = Membership(role)
        cohort = self._membership.cohort or open_cohort(role)
        self._settings = settings
        self._leave = leave
        self._lookout: Lookout | None = None
        around = find_fit()
        if cohort is not None:
            self._lookout = Lookout(
                settings.choice,
                cohort,
                Pace(),
                grace_seconds=settings.grace_period,
                is_wanted=lambda frame: is_running(around, frame),
                on_notice=self._on_notice,
                name="evaluation",
            )
            self._lookout.start()

    def batch_ends(self) -> None:
        if self._lookout is not None:
            self._leave_for(stops(self._lookout.after_step()))

    def ends(self) -> None:
        """A notice that left time to come to the end is due now."""
        if self._lookout is not None:
            self._leave_for(ends_run(self._lookout.at_end()))
        self.close()

    def _leave_for(self, request: Request | None) -> None:
        lookout = self._lookout
        if request is None or lookout is None:
            return
        lookout.answered()
        departure = lookout.departure(self._settings.departure_code)
        self.close()
        self._leave(request.reason, departure)

    def close(self) -> None:
        lookout, self._lookout = self._lookout, None
        if lookout is not None:
            lookout.close()
        self._membership.close()

    def _on_notice(self, notice: Notice) -> None:
        if self._settings.verbose > 0:
            say(f"\n[preemption] Notice from {notice}")
