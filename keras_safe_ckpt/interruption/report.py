"""What happens to a run: a line on the screen, and an event in its log."""

from __future__ import annotations

from typing import Any

from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.interruption.messages import say
from keras_safe_ckpt.preemption.notices import Notice
from keras_safe_ckpt.storage.events import EventLog


class Report:
    """For one worker of a run; ``verbose`` is whether there are lines at all."""

    def __init__(self, events: EventLog | None, role: Role, *, verbose: bool) -> None:
        self._events = events
        self._name = f" {role.task}:" if role.trains_together else ""
        #: Of several workers, for the first event of a run.
        self.who = role.facts()
        self._verbose = verbose

    def say(self, text: str) -> None:
        if self._verbose:
            say(f"\n[preemption]{self._name} {text}")

    def note(self, event: str, **facts: Any) -> None:
        if self._events is not None:
            self._events.record(event, **facts)

    def notice(self, notice: Notice) -> None:
        self.note(
            "notice",
            source=notice.source,
            reason=notice.reason,
            advisory=notice.advisory,
            seconds_left=notice.seconds_left(),
        )
        self.say(f"Notice from {notice}")
