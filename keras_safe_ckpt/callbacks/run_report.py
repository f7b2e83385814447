"""What happens to a run: a line on the screen, and an event in its log."""

from __future__ import annotations

from typing import Any

from keras_safe_ckpt.callbacks.messages import say
from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.preemption.notices import Notice
from keras_safe_ckpt.storage.events import EventLog
from keras_safe_ckpt.training.position import Position


class RunReport:
    """For one worker of a run; ``verbose`` is whether there are lines at all."""

    def __init__(self, events: EventLog, role: Role, *, verbose: bool) -> None:
        self._events = events
        self._name = f" {role.task}:" if role.trains_together else ""
        self._verbose = verbose

    def say(self, text: str) -> None:
        if self._verbose:
            say(f"\n[preemption]{self._name} {text}")

    def record(self, event: str, at: Position, **facts: Any) -> None:
        self._events.record(event, epoch=at.epoch, batch=at.batch, **facts)

    def notice(self, notice: Notice) -> None:
        self._events.record(
            "notice",
            source=notice.source,
            reason=notice.reason,
            advisory=notice.advisory,
            seconds_left=notice.seconds_left(),
        )
        self.say(f"Notice from {notice}")
