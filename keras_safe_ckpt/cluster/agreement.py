"""All workers do something after the same step: stop, or save.

In one process a request is due after the next step. In a cluster a worker may be in a collective
with others at any moment, so nobody may stop at will, and nobody may be waited for by a thread
that trains. So it goes:

1. A request of any worker goes to a log in which all see the same requests in the same order.
2. A thread on every worker reads it, and posts how many steps that worker has finished. The
   training thread halts after its next step, until it is known what was agreed.
3. The leader collects the posts, and publishes ``max(posts) + 1``: nobody is beyond, since nobody
   gets further than one step from what it posted.
4. Everybody trains to that step. Where training ends before, the request is due at its end.

Every wait is bounded. A worker that does not post in time is named in an `AgreementError`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from keras_safe_ckpt.cluster.cohort import Cohort
from keras_safe_ckpt.errors import AgreementError

_log = logging.getLogger(__name__)

#: How long after the leader's patience the others still wait for its word.
_MARGIN_SECONDS = 5.0
_SLICE_SECONDS = 1.0
#: The last entry of a log.
_END: list[Any] = []


@dataclass(frozen=True)
class Request:
    """Who wants all to do what, and (in words) why.

    ``deadline`` is until when, if that is known, and ``heard`` is when this process heard of it,
    both in the time of `time.monotonic` here.
    """

    purpose: str
    reason: str
    task: str
    deadline: float | None = field(default=None, compare=False)
    heard: float = field(default_factory=time.monotonic, compare=False)

    @classmethod
    def within(cls, purpose: str, reason: str, task: str, seconds: float | None) -> Request:
        """One that was just heard of, with so many seconds to its deadline."""
        now = time.monotonic()
        return cls(purpose, reason, task, None if seconds is None else now + seconds, now)

    def seconds_left(self) -> float | None:
        """Until the deadline, 0 at the least; None if it is not known."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())


class Agreement(Protocol):
    """Turns requests that come at any moment into a step after which all workers act."""

    def request(self, purpose: str, reason: str, *, seconds_left: float | None = None) -> bool:
        """Ask all workers, this one included; False if training has ended on one of them.

        ``seconds_left`` is how long there is to do it. From any thread, but not from a signal
        handler.
        """

    @property
    def expects(self) -> bool:
        """Whether a request has come of which nobody knows yet when it is due."""

    def after_step(self) -> tuple[Request, ...]:
        """What is due now. The training thread calls this after each step that it finishes."""

    def at_end(self) -> tuple[Request, ...]:
        """What is due since training ends: all that was agreed for a step that does not come."""

    def close(self) -> None:
        """No more requests, without looking whether there were any."""


class LocalAgreement:
    """For one process: what is requested is due after the step that runs."""

    def __init__(self, task: str = "this process") -> None:
        self._task = task
        self._requests: deque[Request] = deque()
        self._closed = False

    def request(self, purpose: str, reason: str, *, seconds_left: float | None = None) -> bool:
        if self._closed:
            return False
        self._requests.append(Request.within(purpose, reason, self._task, seconds_left))
        return True

    @property
    def expects(self) -> bool:
        return False  # What was requested is due after this step.

    def after_step(self) -> tuple[Request, ...]:
        if not self._requests:
            return ()
        due = []
        while self._requests:
            due.append(self._requests.popleft())
        return tuple(due)

    def at_end(self) -> tuple[Request, ...]:
        self._closed = True
        return self.after_step()

    def close(self) -> None:
        self._closed = True


class _Round:
    """One request, and after which step it is due."""

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.request = request
        self.target = 0
        self.error: AgreementError | None = None
        self.settled = threading.Event()

    def fail(self, error: AgreementError) -> None:
        if not self.settled.is_set():
            self.error = error
            self.settled.set()


class ClusterAgreement:
    """For the workers of a cohort; ``name`` keeps several agreements of one cohort apart."""

    def __init__(self, cohort: Cohort, name: str, *, patience_seconds: float = 30.0) -> None:
        self._cohort = cohort
        self._name = name
        self._patience = patience_seconds
        self._steps = 0
        self._rounds: deque[_Round] = deque()
        self._closed = False
        #: How many entries of the log have become rounds here.
        self._entries_read = 0
        self._reading = threading.Condition()
        self._log_read = threading.Event()
        self._log_error: AgreementError | None = None
        cohort.on_failure(self._give_up)
        _in_background(self._read_log)

    def request(self, purpose: str, reason: str, *, seconds_left: float | None = None) -> bool:
        number = self._append([purpose, reason, self._cohort.task, seconds_left])
        if number is None:
            return False
        # Whoever asks at the end of a step halts there, and not after one step more: if another
        # worker has died that one fails, and nothing could be saved any more.
        with self._reading:
            self._reading.wait_for(lambda: self._has_read(number), _MARGIN_SECONDS)
        return True

    def _has_read(self, number: int) -> bool:
        return self._entries_read > number or self._log_read.is_set()

    @property
    def expects(self) -> bool:
        return bool(self._rounds)

    def after_step(self) -> tuple[Request, ...]:
        # In this order. The reader adds a round before it looks at the count: if the round is not
        # seen here, then what is posted for it has this step in it, and the next step is the
        # first that it can be agreed for.
        self._steps += 1
        if not self._rounds:
            return ()
        return self._due(self._steps)

    def at_end(self) -> tuple[Request, ...]:
        self._cohort.check()
        # The end goes to the log as well, so that all agree which requests came before it.
        self.close()
        if not self._log_read.wait(self._patience + _MARGIN_SECONDS):
            raise AgreementError(self._cohort.members[:1], "the log of requests does not end")
        if self._log_error is not None:
            raise self._log_error
        return self._due(None)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._append(_END)
        except AgreementError as gone:
            _log.debug("Closed without the store: %s", gone)  # Its reader knows, too.

    def _append(self, entry: list[Any]) -> int | None:
        """Its number in the log; None if that has ended."""
        for number in itertools.count():
            if self._cohort.put(f"{self._name}/log/{number}", entry):
                return number
            if self._entry(number) == _END:
                return None
        raise AssertionError("unreachable")

    def _entry(self, number: int) -> list[Any]:
        while True:
            entry = self._cohort.get(f"{self._name}/log/{number}", _SLICE_SECONDS)
            if entry is not None:
                return list(entry)
            if self._log_read.is_set() or self._cohort.closed:
                return _END

    def _due(self, steps: int | None) -> tuple[Request, ...]:
        """The requests that were agreed for this step; all of them if there are no more steps."""
        due = []
        while self._rounds:
            oldest = self._rounds[0]
            oldest.settled.wait()
            if oldest.error is not None:
                raise oldest.error
            if steps is not None and steps < oldest.target:
                break
            due.append(self._rounds.popleft().request)
        return tuple(due)

    def _read_log(self) -> None:
        try:
            for number in itertools.count():
                entry = self._entry(number)
                if entry == _END:
                    return
                round = _Round(number, Request.within(*entry))
                self._rounds.append(round)
                with self._reading:
                    self._entries_read = number + 1
                    self._reading.notify_all()
                # On a thread of its own: the next request does not wait for this one.
                _in_background(self._settle, round)
        except AgreementError as gone:
            self._log_error = gone
        finally:
            with self._reading:
                self._log_read.set()
                self._reading.notify_all()

    def _settle(self, round: _Round) -> None:
        key = f"{self._name}/round/{round.number}"
        try:
            self._cohort.put(f"{key}/{self._cohort.task}", self._steps)
            if self._cohort.leads:
                posts, missing = self._cohort.collect(key, self._patience)
                self._cohort.put(f"{key}/agreed", [max(posts.values()) + 1, missing])
            agreed = self._cohort.await_word(f"{key}/agreed", self._patience + _MARGIN_SECONDS)
            if agreed is None:
                leader = self._cohort.members[0]
                raise AgreementError([leader], f"no word from {leader}")
            round.target, missing = agreed
            if missing:
                waited = f"did not answer within {self._patience:g} s"
                raise AgreementError(missing, f"{', '.join(missing)} {waited}")
            round.settled.set()
        except AgreementError as error:
            round.fail(error)

    def _give_up(self) -> None:
        """A worker has failed: whoever waits for what is agreed hears that."""
        try:
            self._cohort.check()
        except AgreementError as error:
            for round in list(self._rounds):
                round.fail(error)


def agreement_in(cohort: Cohort, name: str, *, patience_seconds: float = 30.0) -> Agreement:
    """The agreement of all workers of a cohort, however many there are."""
    if len(cohort.members) == 1:
        return LocalAgreement(cohort.task)
    return ClusterAgreement(cohort, name, patience_seconds=patience_seconds)


def _in_background(work: Callable[..., None], *arguments: object) -> None:
    name = "keras_safe_ckpt-agreement"
    threading.Thread(target=work, args=arguments, name=name, daemon=True).start()
