"""How a run ends at a notice: what a user says about it, checked when it is said."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_safe_ckpt.preemption.choosing import Choice
from keras_safe_ckpt.preemption.leaving import Departure
from keras_safe_ckpt.storage.lock_backend import Locks, is_locks
from keras_safe_ckpt.storage.writer import wait_for_all_writers


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The arguments that callback and guard have in common, by the same names."""

    choice: Choice
    grace_period: float | None
    on_preempted: str
    exit_code: int
    exit_fn: Callable[[], object] | None
    save_fn: Callable[..., object] | None
    verbose: int
    locks: Locks | None

    def __post_init__(self) -> None:
        """Raise for what would fail after hours, with what was expected and received."""
        require(
            self.on_preempted in ("exit", "stop"),
            "on_preempted", "'exit' or 'stop'", self.on_preempted,
        )  # fmt: skip
        require(
            is_whole(self.exit_code) and 0 <= self.exit_code <= 255,
            "exit_code", "a whole number from 0 to 255", self.exit_code,
        )  # fmt: skip
        require(
            self.grace_period is None or _is_seconds(self.grace_period),
            "grace_period", "seconds, 0 or more", self.grace_period,
        )  # fmt: skip
        require(
            self.verbose in (0, 1, 2), "verbose", "0, 1 or 2", self.verbose,
        )  # fmt: skip
        for name, function in (("exit_fn", self.exit_fn), ("save_fn", self.save_fn)):
            require(function is None or callable(function), name, "a function", function)
        require(
            self.locks is None or is_locks(self.locks),
            "locks", "a LockManager or RedisLocks", self.locks,
        )  # fmt: skip

    @property
    def exits(self) -> bool:
        """Whether a notice ends the program, with `exit_code`."""
        return self.on_preempted == "exit" and self.exit_fn is None

    @property
    def departure_code(self) -> int | None:
        """With which the program is left, if it is."""
        return self.exit_code if self.exits else None

    def describe(self, otherwise: str) -> str:
        """What a notice leads to, in words; ``otherwise`` if nothing of it ends the program."""
        if self.exits:
            return f"exit code {self.exit_code}"
        return otherwise if self.exit_fn is None else "exit_fn is called"


def with_defaults(choice: Choice, **given: Any) -> dict[str, Any]:
    """What a `TerminationConfig` of TensorFlow says, where the arguments leave it open."""
    return {
        name: getattr(choice, name) if value is None else value for name, value in given.items()
    }


def end_program(departure: Departure | None, exit_fn: Callable[[], object] | None) -> None:
    """Leave, when all that was begun is written; returns if the program is to go on."""
    if departure is not None:
        wait_for_all_writers()
        departure.go()
    if exit_fn is None:
        return
    wait_for_all_writers()
    try:
        exit_fn()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            Departure(end.code or 0).go()
        raise


def require(fine: bool, name: str, expected: str, received: Any) -> None:
    """Raise ValueError unless an argument is as it was expected."""
    if not fine:
        raise ValueError(f"Expected {name} to be {expected}. Received: {name}={received!r}")


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_seconds(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < math.inf
