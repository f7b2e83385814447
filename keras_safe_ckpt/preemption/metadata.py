"""A tiny HTTP client for the metadata service of a cloud machine."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

#: Where the clouds keep their service. An address and not a name: asking for a name may take long.
DEFAULT_ENDPOINT = "http://169.254.169.254"

_MOST_BYTES = 64 * 1024


class MetadataError(OSError):
    """There was no answer, or not one that a metadata service gives."""


@dataclass(frozen=True)
class Answer:
    """What the service said. The names of ``headers`` are in lower case."""

    status: int
    text: str
    headers: Mapping[str, str]

    def json(self) -> Any:
        """The text, read as JSON."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise MetadataError(f"the answer is not JSON: {type(error).__name__}") from error

    def expect_ok(self, asked: str) -> Answer:
        """This answer, if the service has one for us."""
        if self.status != 200:
            raise MetadataError(f"expected status 200 for {asked}, received {self.status}")
        return self


class MetadataClient:
    """Asks one host over plain http, and nobody else: no proxy is used, no redirect is followed.

    ``timeout_seconds`` is for a whole request, however slowly the answer drips in. Whatever goes
    wrong in a request is a `MetadataError`::

        client = MetadataClient("http://169.254.169.254")
        client.request("GET", "/latest/meta-data/instance-id").text
    """

    def __init__(self, base_url: str, *, timeout_seconds: float = 1.0) -> None:
        try:
            parts = urlsplit(base_url)
            port = parts.port or 80
            right = parts.scheme == "http" and not (parts.username or parts.query or parts.fragment)
        except ValueError:
            right = False
        if not right or not parts.hostname:
            raise ValueError(
                "Expected the address of a metadata service as http://host[:port]. "
                f"Received: base_url={base_url!r}"
            )
        if not timeout_seconds > 0:
            raise ValueError(
                f"Expected a time limit above 0. Received: timeout_seconds={timeout_seconds}"
            )
        self._host = parts.hostname
        self._port = port
        self._prefix = parts.path.rstrip("/")
        self._timeout = timeout_seconds

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        """Ask once. Any status is an answer, a redirect as well."""
        connection = _TimedConnection(self._host, self._port, time.monotonic() + self._timeout)
        what = f"{method} {path} from {self._host}:{self._port}"
        try:
            connection.request(
                method, self._prefix + path, body, {**(headers or {}), "Connection": "close"}
            )
            with connection.getresponse() as response:
                return _read(response)
        except TimeoutError as error:
            raise MetadataError(f"{what}: no whole answer within {self._timeout:g} s") from error
        except MetadataError as error:
            raise MetadataError(f"{what}: {error}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            # http.client quotes the answer.
            raise MetadataError(f"{what}: {type(error).__name__}: {short(str(error))}") from error
        finally:
            connection.close()


def choose_endpoint(endpoint: str | None, variable: str, default: str = DEFAULT_ENDPOINT) -> str:
    """The address that was given, or the one in the environment, or the usual one.

    The first two may leave out the ``http://``.
    """
    chosen = endpoint or os.environ.get(variable, "").strip() or default
    return chosen if "://" in chosen else f"http://{chosen}"


def deadline_at(moment: datetime, *, at_most_seconds: float) -> float:
    """``moment`` in the time of `time.monotonic`, but not in the past.

    No cloud says it more than ``at_most_seconds`` ahead. If it seems so, the clock here is slow.
    """
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    left = moment.timestamp() - time.time()
    return time.monotonic() + min(max(left, 0.0), at_most_seconds)


def short(value: Any) -> str:
    """A piece of an answer, fit for a message and a log whatever it is."""
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in value[:64])


def _read(response: http.client.HTTPResponse) -> Answer:
    data = response.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise MetadataError(f"the answer is longer than {_MOST_BYTES} bytes")
    if response.length:
        # http.client says nothing if the connection ends before the announced length.
        raise MetadataError("the answer was cut off")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise MetadataError("the answer is not text") from error
    return Answer(
        response.status, text, {name.lower(): value for name, value in response.getheaders()}
    )


class _TimedSocket(socket.socket):
    """Gives up at the deadline. A plain time limit would start anew with each byte received."""

    deadline = 0.0

    def allow_time_left(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)

    def recv_into(self, *arguments: Any, **options: Any) -> int:
        self.allow_time_left()
        return super().recv_into(*arguments, **options)


class _TimedConnection(http.client.HTTPConnection):
    def __init__(self, host: str, port: int, deadline: float) -> None:
        super().__init__(host, port)
        self._deadline = deadline

    def connect(self) -> None:
        failure: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM
        ):
            candidate = _TimedSocket(family, kind, protocol)
            candidate.deadline = self._deadline
            try:
                candidate.allow_time_left()
                candidate.connect(address)
            except OSError as error:
                candidate.close()
                failure = error
            else:
                self.sock = candidate
                return
        raise failure or OSError("the host has no address")
