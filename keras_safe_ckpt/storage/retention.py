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


def unless_newer(incumbent: Manifest | None, new: Manifest) -> str | None:
    """Leave in place what another process published meanwhile, if it is newer."""
    if incumbent is None:
        return None
    theirs, ours = (incumbent.sequence, incumbent.wall_time), (new.sequence, new.wall_time)
    return f"the one in place is newer ({theirs} > {ours})" if theirs > ours else None


class Retention(Protocol):
    """Chooses from the checkpoints of a directory, oldest first, those to keep."""

    def keep(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]: ...


@dataclass(frozen=True)
class KeepNewest:
    """Keep the newest ``count``."""

    count: int

    def __post_init__(self) -> None:
        _require_positive("count", self.count)

    def keep(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        return checkpoints[-self.count :]


@dataclass(frozen=True)
class KeepBest:
    """Keep the ``count`` best by a metric; those without it, or with NaN, are not among them."""

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
class KeepAny:
    """Keep what any of several policies keeps."""

    policies: tuple[Retention, ...]

    def keep(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        chosen = {c.path for policy in self.policies for c in policy.keep(checkpoints)}
        return [c for c in checkpoints if c.path in chosen]


def _require_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"Expected {name} to be a whole number of at least 1. Received: {value!r}")
