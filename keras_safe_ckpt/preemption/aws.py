"""Amazon EC2: an interrupted spot machine has two minutes."""

from __future__ import annotations

import re
import threading
import time
from datetime import datetime
from typing import Any

from keras_safe_ckpt.preemption.metadata import (
    Answer,
    MetadataClient,
    MetadataError,
    choose_endpoint,
    deadline_at,
    short,
)
from keras_safe_ckpt.preemption.notices import Notice, Poller, Watcher

#: Another metadata service, as a URL; Amazon's own libraries read it, too.
ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"

_TOKEN = "/latest/api/token"
_SPOT_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_ACTIONS = ("terminate", "stop", "hibernate")
_INTERRUPTION_SECONDS = 120.0
#: The most that the service allows.
_TOKEN_SECONDS = 21600
#: For so long a service that gives no tokens is not asked for one again.
_NO_TOKEN_SECONDS = 60.0


def aws_watchers(
    *,
    endpoint: str | None = None,
    interval_seconds: float = 1.0,
    timeout_seconds: float = 1.0,
    token_seconds: int = _TOKEN_SECONDS,
) -> list[Watcher]:
    """Watchers for the interruption of a spot machine, and for the advice that one may come."""
    service = _Service(
        MetadataClient(
            choose_endpoint(endpoint, ENDPOINT_VARIABLE), timeout_seconds=timeout_seconds
        ),
        token_seconds,
    )
    return [
        Poller("AWS spot", lambda: _ask_spot(service), interval_seconds=interval_seconds),
        Poller("AWS rebalance", lambda: _ask_rebalance(service), interval_seconds=interval_seconds),
    ]


def _ask_spot(service: _Service) -> Notice | None:
    event = service.event(_SPOT_ACTION)
    if event is None:
        return None
    action, moment = event.get("action"), event.get("time")
    if action not in _ACTIONS:
        raise MetadataError(f"expected action to be one of {_ACTIONS}, received {short(action)}")
    # The time is part of the reason, so that another time is another notice.
    return Notice("AWS spot", f"{action} at {short(moment)}", deadline=_deadline(moment))


def _ask_rebalance(service: _Service) -> Notice | None:
    event = service.event(_REBALANCE)
    if event is None:
        return None
    moment = event.get("noticeTime")
    if not isinstance(moment, str):
        raise MetadataError(f"expected noticeTime to be a time, received {short(moment)}")
    return Notice("AWS rebalance", f"interruption is likely since {short(moment)}", advisory=True)


def _deadline(moment: Any) -> float:
    try:
        # Python 3.10 does not know the Z.
        parsed = datetime.fromisoformat(str(moment).replace("Z", "+00:00"))
        return deadline_at(parsed, at_most_seconds=_INTERRUPTION_SECONDS)
    except (ValueError, OverflowError):
        return time.monotonic() + _INTERRUPTION_SECONDS


class _Service:
    """The metadata service, version 2 (with tokens) if it has that; used by several threads."""

    def __init__(self, client: MetadataClient, token_seconds: int) -> None:
        self._client = client
        self._token_seconds = token_seconds
        self._lock = threading.Lock()
        self._token: str | None = None
        self._renew_at = 0.0

    def event(self, path: str) -> dict[str, Any] | None:
        """The JSON object at ``path``; None if there is no such event now."""
        token = self._current_token()
        answer = self._get(path, token)
        if answer.status == 401:
            # Expired early, as after hibernation, or the service has begun to demand tokens.
            answer = self._get(path, self._current_token(refused=token))
        if answer.status == 404:
            return None
        event = answer.expect_ok(path).json()
        if not isinstance(event, dict):
            raise MetadataError(f"expected an object for {path}, received {short(event)}")
        return event

    def _get(self, path: str, token: str) -> Answer:
        return self._client.request(
            "GET", path, {"X-aws-ec2-metadata-token": token} if token else {}
        )

    def _current_token(self, *, refused: str | None = None) -> str:
        """A token that should be good; empty if the service gives none."""
        with self._lock:
            # Another thread may have replaced the refused one already.
            if self._token is None or self._token == refused or time.monotonic() >= self._renew_at:
                self._token = self._new_token()
            return self._token

    def _new_token(self) -> str:
        asked = time.monotonic()
        answer = self._client.request(
            "PUT", _TOKEN, {"X-aws-ec2-metadata-token-ttl-seconds": str(self._token_seconds)}
        )
        if answer.status in (403, 404, 405):
            self._renew_at = asked + _NO_TOKEN_SECONDS
            return ""
        token = answer.expect_ok(_TOKEN).text.strip()
        if not re.fullmatch(r"[!-~]{1,1024}", token):
            raise MetadataError("the answer is not a token")
        # Before it expires: a request that is refused costs time.
        self._renew_at = asked + 0.8 * self._token_seconds
        return token
