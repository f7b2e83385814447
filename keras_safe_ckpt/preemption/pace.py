"""How long a batch and a save take here, and what follows for a deadline."""

from __future__ import annotations

from dataclasses import dataclass

#: A notice with so much time to spare is long: training goes on, after a save to be safe.
LONG_SECONDS = 30.0
#: For everything that is not measured: agreeing, exiting, a machine that is busy.
_RESERVE_SECONDS = 2.0
#: Saves differ, and the machine has other things to do before its end.
_SAVE_FACTOR = 1.5


@dataclass
class Pace:
    """What was measured, in seconds; None before the first time."""

    batch_seconds: float | None = None
    save_seconds: float | None = None

    def batch_took(self, seconds: float) -> None:
        """The slowest one counts, and is forgotten in time: a first batch is compiled, too."""
        before = self.batch_seconds or 0.0
        self.batch_seconds = max(seconds, 0.9 * before + 0.1 * seconds)

    def save_took(self, seconds: float) -> None:
        """The last ones count, the slowest most."""
        before = self.save_seconds or 0.0
        self.save_seconds = max(seconds, 0.5 * (before + seconds))

    def needed_seconds(self) -> float:
        """From the decision to stop until the checkpoint is durable, with a reserve."""
        batch, save = self.batch_seconds or 0.0, self.save_seconds or 0.0
        return 2 * batch + _SAVE_FACTOR * save + _RESERVE_SECONDS

    def seconds_to_train(self, left: float | None) -> float:
        """How long to go on training when so much is left; 0 is to stop at once."""
        if left is None:
            return 0.0
        spare = left - self.needed_seconds()
        return spare if spare >= LONG_SECONDS else 0.0

    def can_save(self, left: float | None) -> bool:
        """Whether a save that begins now is likely to end in time; so it is if nobody knows."""
        return left is None or self.save_seconds is None or self.save_seconds <= left
