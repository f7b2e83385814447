"""A notice that the end is near, and whoever watches for one."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Notice:
    """Who says it, why, and when the machine will be gone (in the time of `time.monotonic`).

    Without a ``deadline`` it may be gone at any moment. ``advisory``: it may not come to it; a
    checkpoint is worth having, and training goes on.
    """

    source: str
    reason: str
    deadline: float | None = None
    advisory: bool = False
    received: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float | None:
        """Until the deadline, 0 at the least; None if it is not known."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def __str__(self) -> str:
        left = self.seconds_left()
        return f"{self.source}: {self.reason}" + ("" if left is None else f", {left:.0f} s left")


class Desk(Protocol):
    """Where watchers report, from any thread of theirs."""

    def tell(self, notice: Notice) -> None:
        """The end is near."""

    def withdraw(self, source: str) -> None:
        """What this source has said before is not so any more."""


class Watcher(Protocol):
    """Looks out for notices of one kind, from `start` to `stop`; both return at once."""

    name: str

    def start(self, desk: Desk) -> None:
        """Tell the desk from now on."""

    def stop(self) -> None:
        """Tell nobody any more."""


class Poller:
    """A watcher that asks again and again, on a thread of its own.

    ``ask`` returns the notice that holds now, or None. It may take long or raise: training hears
    nothing of that, and the log is told once for each kind of error. A notice is reported once
    for each time that it comes up, and when it changes.
    """

    def __init__(
        self, name: str, ask: Callable[[], Notice | None], *, interval_seconds: float = 1.0
    ) -> None:
        self.name = name
        self._ask = ask
        self._interval = interval_seconds
        self._stopped: threading.Event | None = None  # Made anew at each start.

    def start(self, desk: Desk) -> None:
        stopped = self._stopped = threading.Event()
        threading.Thread(
            target=self._watch,
            args=(desk, stopped),
            name=f"keras_safe_ckpt-notice-{self.name}",
            daemon=True,
        ).start()

    def stop(self) -> None:
        if self._stopped is not None:
            self._stopped.set()
            self._stopped = None

    def _watch(self, desk: Desk, stopped: threading.Event) -> None:
        known: Notice | None = None
        complaints: set[str] = set()
        while not stopped.is_set():
            try:
                notice = self._ask()
            except Exception as error:  # noqa: BLE001  # said once; the next answer may be good
                kind = f"{type(error).__name__}: {error}"
                if kind not in complaints and len(complaints) < 10:
                    complaints.add(kind)
                    _log.warning("No answer from %s, asking on: %s", self.name, kind)
                notice = known  # What was said before holds until something else is said.
            if stopped.is_set():
                return
            if notice is None and known is not None:
                desk.withdraw(known.source)
            elif notice is not None and (known is None or _differ(known, notice)):
                desk.tell(notice)
            # The first telling of the same thing is kept: its deadline was counted from then.
            known = notice if known is None or notice is None or _differ(known, notice) else known
            stopped.wait(self._interval)


def _differ(one: Notice, other: Notice) -> bool:
    return (one.source, one.reason, one.advisory) != (other.source, other.reason, other.advisory)


@contextlib.contextmanager
def watching(watchers: Sequence[Watcher], desk: Desk) -> Iterator[None]:
    """All of them watch while this lasts; those that were started are stopped again."""
    with contextlib.ExitStack() as started:
        for watcher in watchers:
            watcher.start(desk)
            started.callback(watcher.stop)
        yield
