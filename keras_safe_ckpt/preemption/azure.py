"""Microsoft Azure: a preempted spot machine has 30 seconds or more."""

from __future__ import annotations

import email.utils
import re
import time
from typing import Any

from keras_safe_ckpt.preemption.metadata import (
    MetadataClient,
    MetadataError,
    choose_endpoint,
    deadline_at,
    short,
)
from keras_safe_ckpt.preemption.notices import Notice, Poller, Watcher

#: Another metadata service, as a URL.
ENDPOINT_VARIABLE = "KERAS_SAFE_CKPT_AZURE_ENDPOINT"

_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}
#: What a machine does not survive. Freeze is a pause of seconds.
_ENDINGS = ("Preempt", "Terminate", "Reboot", "Redeploy")
#: The shortest notice that Azure gives, for an event that does not say when.
_SHORTEST_SECONDS = 30.0
#: The longest.
_LONGEST_SECONDS = 900.0


def azure_watchers(
    *, endpoint: str | None = None, interval_seconds: float = 1.0, timeout_seconds: float = 5.0
) -> list[Watcher]:
    """A watcher for scheduled events that end this machine. An event may be cancelled again.

    Events are not acknowledged: that tells Azure to go ahead, and it takes the machine at once,
    perhaps in the middle of a save. ``timeout_seconds`` is generous since the first request turns
    the service on, which may take minutes; it is asked again meanwhile.
    """
    client = MetadataClient(
        choose_endpoint(endpoint, ENDPOINT_VARIABLE), timeout_seconds=timeout_seconds
    )
    return [Poller("Azure", _Machine(client).ask, interval_seconds=interval_seconds)]


class _Machine:
    """This machine, and the events that concern it."""

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self._name: str | None = None

    def ask(self) -> Notice | None:
        """The notice of the event that comes first."""
        document = self._client.request("GET", _EVENTS, _HEADERS).expect_ok(_EVENTS).json()
        events = document.get("Events") if isinstance(document, dict) else None
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise MetadataError(f"expected a list of events, received {short(document)}")
        now = time.monotonic()
        notices = [
            _notice(event, now)
            for event in events
            if event.get("EventType") in _ENDINGS and self._concerns_us(event)
        ]
        return min(notices, key=lambda notice: (notice.deadline, notice.reason), default=None)

    def _concerns_us(self, event: dict[str, Any]) -> bool:
        """Whether it names this machine: those of a whole scale set are told of each event."""
        resources = event.get("Resources")
        if not isinstance(resources, list) or not resources:
            return True
        name = self._own_name()
        return name is None or name in [str(resource).lower() for resource in resources]

    def _own_name(self) -> str | None:
        """Asked when it is needed first, and kept once it is known."""
        if self._name is None:
            try:
                answer = self._client.request("GET", _NAME, _HEADERS)
            except MetadataError:
                return None
            name = answer.text.strip().lower()
            # Something else in its place would hide each event from us.
            if answer.status == 200 and re.fullmatch(r"[\w.-]{1,128}", name):
                self._name = name
        return self._name


def _notice(event: dict[str, Any], now: float) -> Notice:
    kind, number = event.get("EventType"), short(event.get("EventId"))
    if event.get("EventStatus") == "Started":
        return Notice("Azure", f"{kind} has started (event {number})", deadline=now)
    not_before = event.get("NotBefore") or ""
    # The time is part of the reason, so that another time is another notice.
    when = f" not before {short(not_before)}" if not_before else ""
    deadline = _deadline(not_before, now)
    return Notice("Azure", f"{kind} is scheduled{when} (event {number})", deadline=deadline)


def _deadline(not_before: Any, now: float) -> float:
    try:
        moment = email.utils.parsedate_to_datetime(str(not_before))
        return deadline_at(moment, at_most_seconds=_LONGEST_SECONDS)
    except (ValueError, TypeError, IndexError, OverflowError):
        return now + _SHORTEST_SECONDS
