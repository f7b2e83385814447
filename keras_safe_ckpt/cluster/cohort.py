"""The workers that train one model together: they pass barriers together, and fail together."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from keras_safe_ckpt.cluster.coordination import (
    LocalStore,
    Store,
    coordination_store,
    unreachable_tasks,
    wait_for,
)
from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.errors import AgreementError

_log = logging.getLogger(__name__)

#: How often a thread that waits for news looks whether it is still wanted.
_SLICE_SECONDS = 1.0
#: All workers may meet the same error at the same step: only who is still training after this
#: long is torn out of its collectives, since they cannot be used again afterwards.
_SETTLE_SECONDS = 1.0
#: The leader carries the store: it leaves a barrier last, if the others do not take longer.
_DEPARTURE_SECONDS = 5.0

_THREAD_NAME = "keras_safe_ckpt-cohort"

_generations = itertools.count()


class Cohort:
    """One common stretch of training: from the beginning of a `fit`, on all workers, to its end.

    Each generation has keys of its own, so that one `fit` can follow another. ``task`` is this
    worker, one of ``members``; the first of them is the leader, which collects and decides.
    """

    def __init__(
        self, store: Store, task: str, members: tuple[str, ...], generation: int | None = None
    ) -> None:
        self._store = store
        self.task = task
        self.members = members
        if generation is None:
            # Who is alone is not counted: the others know nothing of it.
            generation = next(_generations) if len(members) > 1 else 0
        self._prefix = f"keras_safe_ckpt/{generation}"
        self._barriers: dict[str, int] = {}
        self._failure: tuple[list[str], str] | None = None
        self._failed_here = False
        self._closed = threading.Event()
        self._listeners: list[Callable[[], None]] = []
        if len(members) > 1:
            listener = threading.Thread(target=self._listen, name=_THREAD_NAME, daemon=True)
            listener.start()

    @property
    def leads(self) -> bool:
        return self.task == self.members[0]

    # Keys of this cohort, for the agreements that are built on it.

    def put(self, key: str, value: Any) -> bool:
        """Write a value (of JSON) that all can read; False if somebody has done so before."""
        with self._reason_for_a_lost_store():
            return self._store.put(f"{self._prefix}/{key}", json.dumps(value))

    def get(self, key: str, seconds: float) -> Any:
        """The value of a key, or None if it has none after so long."""
        with self._reason_for_a_lost_store():
            value = wait_for(self._store, f"{self._prefix}/{key}", time.monotonic() + seconds)
        return None if value is None else json.loads(value)

    @contextmanager
    def _reason_for_a_lost_store(self) -> Iterator[None]:
        """It goes with the leader; if that one said before why it ends, that is what to say."""
        try:
            yield
        except AgreementError:
            self.check()
            raise

    def await_word(self, key: str, seconds: float) -> Any:
        """As `get`; raises as soon as it is known that a worker has failed."""
        deadline = time.monotonic() + seconds
        while True:
            value = self.get(key, min(_SLICE_SECONDS, _left(deadline)))
            if value is not None:
                return value
            self.check()
            if not _left(deadline):
                return None

    def collect(self, key: str, seconds: float) -> tuple[dict[str, Any], list[str]]:
        """What each member has written under ``key/<task>``, and who has not in this time."""
        values: dict[str, Any] = {}
        deadline = time.monotonic() + seconds
        waiting, dead = list(self.members), list[str]()
        while waiting:
            value = self.get(f"{key}/{waiting[0]}", min(_SLICE_SECONDS, _left(deadline)))
            if value is not None:
                values[waiting.pop(0)] = value
                continue
            self.check()
            if not _left(deadline):
                break
            # Nothing more will come from those, and the others need not wait for them.
            dead += [task for task in self._store.lost() if task in waiting]
            waiting = [task for task in waiting if task not in dead]
        return values, dead + waiting

    # Failures.

    def check(self) -> None:
        """Raise `AgreementError` if another worker has failed."""
        if self._failure is not None and not self._failed_here:
            raise AgreementError(*self._failure)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this worker ends by ``error``; the first one is what they hear."""
        if self._failed_here or self._closed.is_set():
            return
        self._failed_here = True
        if isinstance(error, AgreementError):
            blame = [list(error.missing), error.reason]  # Who is to blame, not who noticed it.
        else:
            blame = [[self.task], f"{self.task} failed with {type(error).__name__}: {error}"]
        try:
            self.put("failure", blame)
        except AgreementError as gone:
            # Its own error is what this worker ends with, and the others have lost the store too.
            _log.warning("The other workers could not be told: %s", gone)

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Tell the others of what is raised in here; say who failed if it was one of them."""
        try:
            yield
            self.check()  # Who has ended before the news came is to hear it now.
        except BaseException as error:
            cause = self._failure_behind(error)
            if cause is None:
                self.fail(error)
                raise
            self.fail(cause)
            raise cause from error

    def on_failure(self, listener: Callable[[], None]) -> None:
        """Call ``listener()`` on another thread when a worker has failed."""
        self._listeners.append(listener)

    # Barriers.

    def barrier(
        self, name: str, error: BaseException | None = None, *, seconds: float = 600.0
    ) -> None:
        """Return when all are here, and none came with an error.

        Whoever came with an error gets that one, the others an `AgreementError` with its text.
        The same if somebody does not come within ``seconds``, or died.
        """
        number = self._barriers[name] = self._barriers.get(name, -1) + 1
        key = f"barrier/{name}/{number}"
        mine = None if error is None else f"{type(error).__name__}: {error}"
        try:
            self.put(f"{key}/{self.task}", {"error": mine})
            verdict = self._verdict(key, seconds)
        except AgreementError:
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        if verdict["errors"]:
            who, what = verdict["errors"][0]
            raise AgreementError([who], f"{who} failed with {what}")
        if verdict["missing"]:
            raise AgreementError(
                verdict["missing"], f"{len(verdict['missing'])} of {len(self.members)} workers "
                f"did not come to {name!r}"
            )  # fmt: skip

    def _verdict(self, key: str, seconds: float) -> dict[str, Any]:
        if self.leads:
            values, missing = self.collect(key, seconds)
            errors = [[task, value["error"]] for task, value in values.items() if value["error"]]
            verdict = {"errors": errors, "missing": missing}
            self.put(f"{key}/verdict", verdict)
            self._see_off(key, [task for task in values if task != self.task])
            return verdict
        leader = self.members[0]
        found = self.await_word(f"{key}/verdict", seconds + _DEPARTURE_SECONDS)
        if found is None and self.get(f"{key}/{leader}", 0) is not None:
            # It came later than this worker, and may still be waiting for somebody else.
            found = self.await_word(f"{key}/verdict", seconds + _DEPARTURE_SECONDS)
        if found is None:
            raise AgreementError([leader], f"no word from {leader}")
        self.put(f"{key}/left/{self.task}", True)
        return dict(found)

    def _see_off(self, key: str, tasks: list[str]) -> None:
        deadline = time.monotonic() + _DEPARTURE_SECONDS
        for task in tasks:
            if self.get(f"{key}/left/{task}", _left(deadline)) is None:
                return

    # Its life.

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """This worker has ended its stretch; the others go on hearing of each other's failures."""
        self._closed.set()

    def _listen(self) -> None:
        """Wait for the failure of another worker, and tear this one out of its waiting."""
        try:
            key, value = f"{self._prefix}/failure", None
            while value is None and not self.closed:
                value = self._store.get(key, _SLICE_SECONDS)
        except AgreementError as gone:
            # The collectives of this worker fail by themselves, and say why.
            _log.debug("No more news of failures: %s", gone)
            return
        if value is None or self.closed or self._failed_here:
            return
        missing, reason = json.loads(value)
        self._failure = (missing, reason)
        for listener in list(self._listeners):
            listener()
        if not self._closed.wait(_SETTLE_SECONDS) and not self._failed_here:
            self._store.abort_collectives(reason)

    def _failure_behind(self, error: BaseException) -> AgreementError | None:
        """Which other worker is to blame, if one is."""
        if self._failed_here or isinstance(error, AgreementError):
            return None
        if self._failure is not None and type(error).__module__.startswith("tensorflow"):
            return AgreementError(*self._failure)
        dead = [task for task in unreachable_tasks(error) if task != self.task]
        if dead:
            reason = f"{dead[0]} ended without a word; it was killed, or its machine is gone"
            return AgreementError(dead, reason)
        return None


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


_current: Cohort | None = None


@contextmanager
def common_run(role: Role) -> Iterator[None]:
    """Everything in here, nested runs included, belongs to one cohort, and is guarded."""
    global _current
    cohort = None if _current is not None else open_cohort(role)
    if cohort is None:
        yield
        return
    _current = cohort
    try:
        with cohort.guarding():
            yield
    finally:
        _current = None
        cohort.close()


def current_cohort() -> Cohort | None:
    """That of the `common_run` around this, if there is one."""
    return _current


def open_cohort(role: Role) -> Cohort | None:
    """The cohort of this process, newly opened: all workers open theirs in the same order.

    None, with a warning, where TensorFlow does not let the workers talk to each other.
    """
    if not role.trains_together:
        task = role.task or "this process"
        return Cohort(LocalStore(), task, (task,))
    jobs = Counter(task.partition(" ")[0] for task in role.members)
    store, reason = coordination_store(list(jobs.items()))
    if store is None:
        _log.warning(
            "The workers cannot talk to each other (%s): an error in one of them may leave the "
            "others waiting.",
            reason,
        )
        return None
    return Cohort(store, role.task, role.members)
