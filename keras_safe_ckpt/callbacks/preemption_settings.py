"""What a user tells a `PreemptionAwareCallback`, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from keras_safe_ckpt.interruption.ending import Ending, is_whole, require
from keras_safe_ckpt.training.cadence import EveryBatches, EverySeconds


@dataclass(frozen=True, kw_only=True)
class Settings(Ending):
    """The arguments of the callback, by the same names."""

    directory: str
    save_freq: str | int | None
    save_every_seconds: float | None
    max_to_keep: int
    log_dir: str | None
    delete_checkpoint: bool
    restore: bool | str

    def __post_init__(self) -> None:
        """Raise for what would fail after hours, with what was expected and received."""
        if self.save_freq not in ("epoch", None):
            if not is_whole(self.save_freq):
                raise ValueError(
                    "Expected save_freq to be 'epoch', a number of batches or None. "
                    f"Received: save_freq={self.save_freq!r}"
                )
            EveryBatches(int(self.save_freq))
        if self.save_every_seconds is not None:
            EverySeconds(self.save_every_seconds)
        require(
            is_whole(self.max_to_keep) and self.max_to_keep >= 1,
            "max_to_keep", "a whole number of at least 1", self.max_to_keep,
        )  # fmt: skip
        require(
            self.restore is True or self.restore is False or self.restore == "if_possible",
            "restore", "True, False or 'if_possible'", self.restore,
        )  # fmt: skip
        super().__post_init__()

    @property
    def makes_backups(self) -> bool:
        """Whether there are others than the checkpoint of a notice."""
        return self.save_freq is not None or self.save_every_seconds is not None

    @property
    def writes(self) -> bool:
        """Whether there are checkpoints of ours at all, and not only ``save_fn``."""
        return self.save_fn is None
