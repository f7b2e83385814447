"""When to save: after epochs, after batches, after seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol


class Cadence(Protocol):
    """Asked at every boundary whether a save is due, and told when one was made."""

    def after_batch(self, batch: int) -> bool: ...

    def after_epoch(self) -> bool: ...

    def saved(self) -> None: ...

    def get_state(self) -> list[int]:
        """What `set_state` of the same cadence in another process needs to count on."""

    def set_state(self, state: list[int]) -> None: ...


class _WithoutState:
    def get_state(self) -> list[int]:
        return []

    def set_state(self, state: list[int]) -> None:
        """There is nothing to count."""


class EveryEpoch(_WithoutState):
    """After each epoch."""

    def after_batch(self, batch: int) -> bool:
        return False

    def after_epoch(self) -> bool:
        return True

    def saved(self) -> None:
        """Saves for other reasons change nothing."""


class EveryBatches:
    """After each ``count`` batches, also where several are executed at once.

    With ``steps_per_execution`` only the last batch of an execution is reported; the save comes
    at the first one reported at which ``count`` or more have passed. ``last`` is the last batch
    before the first one that will be reported.
    """

    def __init__(self, count: int, last: int = -1) -> None:
        if count < 1:
            raise ValueError(
                f"Expected save_freq to be 'epoch' or at least 1. Received: save_freq={count}"
            )
        self._count = count
        self._passed = 0
        self._last = last

    def after_batch(self, batch: int) -> bool:
        # A number that does not grow is the first of a new epoch.
        self._passed += batch - self._last if batch > self._last else batch + 1
        self._last = batch
        if self._passed < self._count:
            return False
        self._passed = 0
        return True

    def after_epoch(self) -> bool:
        return False

    def saved(self) -> None:
        """Saves for other reasons change nothing."""

    def get_state(self) -> list[int]:
        return [self._passed, self._last]

    def set_state(self, state: list[int]) -> None:
        self._passed, self._last = state


class EverySeconds(_WithoutState):
    """At the first boundary after ``seconds`` have passed since the last save.

    In another process the time begins anew.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
            raise ValueError(
                "Expected save_every_seconds to be a number of more than 0. "
                f"Received: save_every_seconds={seconds!r}"
            )
        self._seconds = seconds
        self._clock = clock
        self.saved()

    def saved(self) -> None:
        """Count from now on."""
        self._next = self._clock() + self._seconds

    def after_batch(self, batch: int) -> bool:
        return self.after_epoch()

    def after_epoch(self) -> bool:
        if self._clock() < self._next:
            return False
        self.saved()  # Due once, also if it turns out that there is nothing worth saving.
        return True


class AnyOf:
    """When one of several says so."""

    def __init__(self, cadences: Sequence[Cadence]) -> None:
        self._cadences = tuple(cadences)

    def after_batch(self, batch: int) -> bool:
        due = False
        for cadence in self._cadences:  # All of them: each one counts.
            due |= cadence.after_batch(batch)
        return due

    def after_epoch(self) -> bool:
        due = False
        for cadence in self._cadences:
            due |= cadence.after_epoch()
        return due

    def saved(self) -> None:
        for cadence in self._cadences:
            cadence.saved()

    def get_state(self) -> list[int]:
        return [number for cadence in self._cadences for number in cadence.get_state()]

    def set_state(self, state: list[int]) -> None:
        for cadence in self._cadences:
            own = len(cadence.get_state())
            cadence.set_state(state[:own])
            state = state[own:]
