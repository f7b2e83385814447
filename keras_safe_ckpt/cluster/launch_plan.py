"""What a launcher is asked for, and what became of it; quick to import."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

#: What a preempted worker ends with (elsewhere, and on Google's machines) to be started again.
RESTART_CODES = (42, 143)


@dataclass(frozen=True)
class Plan:
    """What is to be run, how often, and how long to wait in between."""

    command: Sequence[str]
    workers: int
    max_restarts: int = 10
    restart_codes: Collection[int] = RESTART_CODES
    first_pause_seconds: float = 0.5
    #: How long the workers have to end after a signal, before they are killed.
    grace_seconds: float = 60.0


@dataclass
class Attempt:
    """One life of the group: how each worker ended, and after how long."""

    #: By worker, in the order in which they ended.
    codes: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def first_failure(self) -> tuple[int, int] | None:
        """The worker that ended the group, and its code."""
        return next(((worker, code) for worker, code in self.codes.items() if code), None)


@dataclass
class Outcome:
    """All lives of the group, and the exit code of the launcher."""

    attempts: list[Attempt]
    code: int
    verdict: str


def describe_code(code: int) -> str:
    """An exit code as a person would say it; signals are counted from 128 as a shell does."""
    with contextlib.suppress(ValueError):
        if code > 128:
            return f"code {code} ({signal.Signals(code - 128).name})"
    return f"code {code}"
