"""The save that a notice leads to: by all workers, in time, or as well as can be."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import Any

from keras_safe_ckpt.cluster.cohort import Cohort
from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.errors import AgreementError
from keras_safe_ckpt.loops.guarded_state import GuardedState
from keras_safe_ckpt.preemption.pace import Pace

_log = logging.getLogger(__name__)

#: How long the workers wait for each other's save.
_MEETING_SECONDS = 600.0
#: How long a save may take for which some of the workers are missing: it may wait for them.
_ALONE_SECONDS = 60.0
_STANDS = "; the last checkpoint stands"


class GuardSave:
    """Its methods return what has come of it, in words; none of them raises an error.

    The machine will be gone: whatever cannot be saved now, the program is to be started again.
    """

    def __init__(self, state: GuardedState, role: Role, cohort: Cohort, pace: Pace) -> None:
        self._state = state
        self._role = role
        self._cohort = cohort
        self._pace = pace
        self._numbers = itertools.count()

    def together(
        self,
        runs: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seconds_left: float | None,
    ) -> str:
        """All workers do this at the same boundary, and go on when all are done."""
        outcome, failure = "saved", None
        try:
            if self._all_begin(seconds_left):
                began = time.perf_counter()
                self._state.save(runs, args, kwargs)
                self._pace.save_took(time.perf_counter() - began)
            else:
                took = self._pace.save_seconds or 0.0
                outcome = (
                    f"not saved: {seconds_left or 0.0:.1f} s are left, and a save takes "
                    f"{took:.1f} s{_STANDS}"
                )
        except Exception as error:  # noqa: BLE001  # said and recorded; see above
            _log.error("The checkpoint could not be written: %s", error)
            outcome, failure = f"not saved: {error}{_STANDS}", error
        return self._met(outcome, failure, seconds_left)

    def alone(self, runs: int, gone: AgreementError, seconds_left: float | None) -> str:
        """Somebody is missing: the first of those who are left saves what it has."""
        left = [task for task in self._role.members if task not in gone.missing]
        if gone.missing and left and self._role.task != left[0]:
            return f"left to {left[0]} to save: {gone.reason}"
        outcome: list[str] = []

        def save() -> None:
            try:
                self._state.save_alone(runs)
            except Exception as error:  # noqa: BLE001  # said and recorded; see above
                outcome.append(f"not saved: {error}{_STANDS}")
            else:
                outcome.append(f"saved, degraded: {gone.reason}")

        # On another thread, since a variable may be read together with those who are gone.
        thread = threading.Thread(target=save, name="keras_safe_ckpt-last-save", daemon=True)
        thread.start()
        limit = _ALONE_SECONDS if seconds_left is None else min(_ALONE_SECONDS, seconds_left)
        thread.join(limit)
        return outcome[0] if outcome else f"not saved within {limit:.0f} s{_STANDS}"

    def _all_begin(self, seconds_left: float | None) -> bool:
        """As the chief sees it: whoever begins waits for the others, at the latest in reading."""
        if not self._role.trains_together:
            return self._pace.can_save(seconds_left)
        key = f"guard/begin/{next(self._numbers)}"
        if not self._cohort.leads:
            return bool(self._cohort.await_word(key, _MEETING_SECONDS))
        begins = False
        try:
            begins = self._pace.can_save(seconds_left)
            if begins:
                self._state.ensure_ready()
        except BaseException:
            begins = False
            raise
        finally:
            self._cohort.put(key, begins)
        return begins

    def _met(self, outcome: str, failure: Exception | None, seconds_left: float | None) -> str:
        if not self._role.trains_together:
            return outcome
        # Not beyond the deadline: then the program leaves, and nobody waits for it any more.
        seconds = _MEETING_SECONDS if seconds_left is None else max(1.0, seconds_left)
        try:
            self._cohort.barrier("guard", failure, seconds=min(_MEETING_SECONDS, seconds))
        except AgreementError as gone:
            if self._role.chief and failure is None:
                return f"{outcome}, but the workers could not meet any more: {gone.reason}"
            return f"not saved: {gone.reason}{_STANDS}"
        except Exception as error:  # noqa: BLE001  # this worker's own, as the barrier gives it back
            return f"not saved: {error}{_STANDS}"
        return outcome
