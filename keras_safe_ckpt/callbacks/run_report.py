"""What happens to a run of `fit`, and where in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from keras_safe_ckpt.interruption.report import Report
from keras_safe_ckpt.preemption.slurm import describe_job
from keras_safe_ckpt.training.position import Position

_CALLBACK = "PreemptionAwareCallback"


class RunReport(Report):
    """A report whose events say at which batch they were."""

    def record(self, event: str, at: Position, **facts: Any) -> None:
        self.note(event, epoch=at.epoch, batch=at.batch, **facts)

    def begin(self, at: Position, params: Mapping[str, Any], notices: str) -> None:
        """Training begins; ``params`` are those that Keras gives to a callback."""
        plan = {name: params.get(name) for name in ("epochs", "steps")}
        job = describe_job(os.environ)
        self.record("begin", at, callback=_CALLBACK, **plan, **self.who, notices=notices, **job)

    def finished(self, epochs: int) -> None:
        self.note("finished", callback=_CALLBACK, epochs=epochs)
