"""What happens to a run of `fit`, and where in it."""

from __future__ import annotations

from typing import Any

from keras_safe_ckpt.interruption.report import Report
from keras_safe_ckpt.training.position import Position


class RunReport(Report):
    """A report whose events say at which batch they were."""

    def record(self, event: str, at: Position, **facts: Any) -> None:
        self.note(event, epoch=at.epoch, batch=at.batch, **facts)
