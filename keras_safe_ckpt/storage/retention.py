"""Which checkpoints to keep: policies and vetoes only choose, the store acts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from keras_safe_ckpt.storage.manifest import Manifest


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file and what it says about itself."""

    path: Path
    manifest: Manifest


#: Asked under the lock, with what is at the target now and what is to replace it. A text is the
#: reason to leave the incumbent in place.
Veto = Callable[[Manifest | None, Manifest], str | None]


#: Asked under the lock, with what is replaced and by what: whether to keep it by another name.
SetAside = Callable[[Manifest, Manifest], bool]


def unless_newer(incumbent: Manifest | None, new: Manifest) -> str | None:
    """Leave in place what another process published meanwhile, if it is newer."""
    if incumbent is None:
        return None
    theirs, ours = (incumbent.sequence, incumbent.wall_time), (new.sequence, new.wall_time)
    return f"the one in place is newer ({theirs} > {ours})" if theirs > ours else None


class Retention(Protocol):
    """Chooses from the checkpoints of a directory, oldest first, those to keep."""

    def keep(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        """Those of one series that are to stay."""


@dataclass(frozen=True)
class KeepNewest:
    """Keep the newest ``count``.

    Example::

        store.publish(model, step=100, retention=KeepNewest(3))
    """

    count: int

    def __post_init__(self) -> None:
        _require_positive("count", self.count)

    def keep(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        return checkpoints[-self.count :]


@dataclass(frozen=True)
class KeepBest:
    """Keep the ``count`` best by a metric; those without it, or with NaN, are not among them.

    Args:
        count: how many.
        monitor: the metric.
        mode: ``"min"`` or ``"max"``, whichever is better.

    Example::

        store.publish(
            model, step=100, metrics={"accuracy": 0.9}, retention=KeepBest(2, "accuracy", "max")
        )
    """

    count: int
    monitor: str
    mode: str = "min"

    def __post_init__(self) -> None:
        _require_positive("count", self.count)
        if self.mode not in ("min", "max"):
            raise ValueError(f"Expected mode 'min' or 'max'. Received: mode={self.mode!r}")

    def keep(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        # The sort is stable and the newest come first: of equals, the newest is kept.
        judged = [c for c in reversed(checkpoints) if not math.isnan(self._value(c))]
        judged.sort(key=self._value if self.mode == "min" else lambda c: -self._value(c))
        return judged[: self.count]

    def _value(self, checkpoint: Checkpoint) -> float:
        return float(checkpoint.manifest.metrics.get(self.monitor, math.nan))


@dataclass(frozen=True)
class KeepEvery:
    """Keep one (the last) of each ``epochs`` epochs, or of each ``hours`` hours.

    Example::

        store.prune(KeepAny((KeepEvery(hours=24), KeepNewest(5))))
    """

    epochs: int | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.hours is None):
            raise ValueError(
                f"Expected either epochs or hours. Received: epochs={self.epochs}, "
                f"hours={self.hours}"
            )
        if self.epochs is not None:
            _require_positive("epochs", self.epochs)
        elif not (self.hours or 0) > 0:
            raise ValueError(f"Expected hours to be more than 0. Received: {self.hours!r}")

    def keep(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        last = {self._period(c): c for c in checkpoints if self._period(c) is not None}
        return list(last.values())

    def _period(self, checkpoint: Checkpoint) -> int | None:
        if self.hours is not None:
            return int(checkpoint.manifest.wall_time // (self.hours * 3600))
        epoch, batch = checkpoint.manifest.epoch, checkpoint.manifest.batch
        if epoch is None or self.epochs is None:
            return None
        # The end of epoch 5 closes the period of 1 to 5; one batch later the next one is open.
        return (epoch if batch else epoch - 1) // self.epochs


@dataclass(frozen=True)
class KeepAny:
    """Keep what any of several ``policies`` keeps.

    Example::

        store.prune(KeepAny((KeepNewest(3), KeepBest(1, "loss"))))
    """

    policies: tuple[Retention, ...]

    def keep(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        chosen = {c.path for policy in self.policies for c in policy.keep(checkpoints)}
        return [c for c in checkpoints if c.path in chosen]


def _require_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"Expected {name} to be a whole number of at least 1. Received: {value!r}")
