"""What a user tells a `PreemptionAwareCallback`, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_safe_ckpt.preemption.choosing import Choice
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.training.cadence import EveryBatches, EverySeconds


@dataclass(frozen=True)
class Settings:
    """The arguments of the callback, by the same names."""

    directory: str
    save_freq: str | int | None
    save_every_seconds: float | None
    max_to_keep: int
    delete_checkpoint: bool
    restore: bool | str
    choice: Choice
    grace_period: float | None
    on_preempted: str
    exit_code: int
    exit_fn: Callable[[], object] | None
    save_fn: Callable[[], object] | None
    verbose: int
    locks: Locks | None

    def __post_init__(self) -> None:
        """Raise for what would fail after hours, with what was expected and received."""
        if self.save_freq not in ("epoch", None):
            if not _is_whole(self.save_freq):
                raise ValueError(
                    "Expected save_freq to be 'epoch', a number of batches or None. "
                    f"Received: save_freq={self.save_freq!r}"
                )
            EveryBatches(int(self.save_freq))
        if self.save_every_seconds is not None:
            EverySeconds(self.save_every_seconds)
        _require(
            _is_whole(self.max_to_keep) and self.max_to_keep >= 1,
            "max_to_keep", "a whole number of at least 1", self.max_to_keep,
        )  # fmt: skip
        _require(
            self.restore is True or self.restore is False or self.restore == "if_possible",
            "restore", "True, False or 'if_possible'", self.restore,
        )  # fmt: skip
        _require(
            self.on_preempted in ("exit", "stop"),
            "on_preempted", "'exit' or 'stop'", self.on_preempted,
        )  # fmt: skip
        _require(
            _is_whole(self.exit_code) and 0 <= self.exit_code <= 255,
            "exit_code", "a whole number from 0 to 255", self.exit_code,
        )  # fmt: skip
        _require(
            self.grace_period is None or _is_seconds(self.grace_period),
            "grace_period", "seconds, 0 or more", self.grace_period,
        )  # fmt: skip
        _require(
            self.verbose in (0, 1, 2), "verbose", "0, 1 or 2", self.verbose,
        )  # fmt: skip
        for name, function in (("exit_fn", self.exit_fn), ("save_fn", self.save_fn)):
            _require(function is None or callable(function), name, "a function", function)
        _require(
            self.locks is None or callable(getattr(self.locks, "exclusive", None)),
            "locks", "a LockManager or RedisLocks", self.locks,
        )  # fmt: skip

    @property
    def exits(self) -> bool:
        """Whether a notice ends the program, with `exit_code`."""
        return self.on_preempted == "exit" and self.exit_fn is None

    @property
    def ending(self) -> str:
        """What a notice leads to, in words."""
        if self.exits:
            return f"exit code {self.exit_code}"
        return "fit ends" if self.exit_fn is None else "exit_fn is called"

    @property
    def writes(self) -> bool:
        """Whether there are checkpoints of ours at all, and not only ``save_fn``."""
        return self.save_fn is None


def _require(fine: bool, name: str, expected: str, received: Any) -> None:
    if not fine:
        raise ValueError(f"Expected {name} to be {expected}. Received: {name}={received!r}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_seconds(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < math.inf
