"""Metadata services on loopback ports that behave like the real ones, also on a bad day."""

from __future__ import annotations

import http.server
import itertools
import json
import threading
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

HTML = "<html><body>Log in to use this network</body></html>"
TOO_LONG = 64 * 1024 + 1


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self.server.service.serve(self)

    do_PUT = do_POST = do_CONNECT = do_GET  # noqa: N815

    def reply(self, status: int, body: str | bytes = b"", **headers: str) -> None:
        body = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # Closing waits for the handlers, so that no test disturbs another.
    service: MetadataServer

    def handle_error(self, *_: Any) -> None:
        """A client that has given up is part of the test."""


class MetadataServer:
    """Runs within ``with``. ``fault`` is one of `FAULTS`, for paths that contain ``fault_path``.

    ``requests`` has the method and path of each request, ``faulted`` counts the bad answers.
    """

    #: Sent with each true answer.
    signature: dict[str, str] = {}  # noqa: RUF012  # never changed
    #: What an answer would look like to somebody who does not look closely.
    tempting = "{}"

    def __init__(self) -> None:
        self.fault = ""
        self.fault_path = ""
        self.redirect_to = ""
        self.requests: list[tuple[str, str]] = []
        self.faulted = 0
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler, bind_and_activate=False)
        self._server.service = self
        self._server.server_bind()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), name="metadata-server"
        )

    def __enter__(self) -> Any:
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def listen(self) -> None:
        """Until then connections are refused."""
        self._server.server_activate()
        self._thread.start()

    def count(self, part: str = "") -> int:
        return sum(part in path for _, path in list(self.requests))

    def serve(self, handler: _Handler) -> None:
        self.requests.append((handler.command, handler.path))
        fault = self.fault if self.fault_path in handler.path else ""
        if not fault:
            self.answer(handler)
            return
        self.faulted += 1
        FAULTS[fault](self, handler)
        handler.close_connection = True

    def answer(self, handler: _Handler) -> None:
        handler.reply(404)

    def hang(self, handler: _Handler) -> None:
        self._closing.wait(20)

    def drip(self, handler: _Handler) -> None:
        """Byte by byte, each well within any time limit."""
        text = f"HTTP/1.1 200 OK\r\nContent-Length: {TOO_LONG}\r\nX-Slow: "
        for char in itertools.chain(text, itertools.repeat("x")):
            if self._closing.wait(0.01):
                return
            handler.wfile.write(char.encode())

    def cut_off(self, handler: _Handler) -> None:
        handler.send_response(200)
        for name, value in self.signature.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(self.tempting) + 10))
        handler.end_headers()
        handler.wfile.write(self.tempting.encode())

    def redirect(self, handler: _Handler) -> None:
        handler.reply(302, self.tempting, Location=self.redirect_to + handler.path)

    def status(self, handler: _Handler, status: int, body: str | bytes | None = None) -> None:
        handler.reply(status, self.tempting if body is None else body, **self.signature)


FAULTS: dict[str, Any] = {
    "401": lambda server, handler: server.status(handler, 401),
    "403": lambda server, handler: server.status(handler, 403),
    "404": lambda server, handler: server.status(handler, 404),
    "405": lambda server, handler: server.status(handler, 405),
    "500": lambda server, handler: server.status(handler, 500),
    "hang": MetadataServer.hang,
    "drip": MetadataServer.drip,
    "no answer": lambda server, handler: None,
    "cut off": MetadataServer.cut_off,
    "redirect": MetadataServer.redirect,
    "not HTTP": lambda server, handler: handler.wfile.write(b"\x00\xff hello\r\n\r\n"),
    "not JSON": lambda server, handler: server.status(handler, 200, "{oops"),
    "other JSON": lambda server, handler: server.status(handler, 200, '["TRUE", {"Events": 1}]'),
    "empty object": lambda server, handler: server.status(handler, 200, "{}"),
    "odd object": lambda server, handler: server.status(handler, 200, '{"Events": {}}'),
    "binary": lambda server, handler: server.status(handler, 200, b"\xff\xfe\x00" * 20),
    "deep": lambda server, handler: server.status(handler, 200, "[" * 60_000),
    "huge": lambda server, handler: server.status(
        handler, 200, server.tempting + " " * (TOO_LONG - len(server.tempting))
    ),
    "portal": lambda server, handler: handler.reply(200, HTML),
}


class GcpServer(MetadataServer):
    """Google's: plain values, for those only who send its header; signed by the same header."""

    signature = {"Metadata-Flavor": "Google"}  # noqa: RUF012
    tempting = "TRUE"

    def __init__(self) -> None:
        super().__init__()
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}

    def answer(self, handler: _Handler) -> None:
        if handler.headers.get("Metadata-Flavor") != "Google":
            self.status(handler, 403, HTML)
            return
        folder, _, name = handler.path.rpartition("/")
        if folder != "/computeMetadata/v1/instance" or name not in self.values:
            self.status(handler, 404, HTML)
            return
        self.status(handler, 200, self.values[name])


class AwsServer(MetadataServer):
    """Amazon's. ``tokens``: "required" (version 2 only), "optional", or "absent" (version 1)."""

    tempting = '{"action": "terminate", "time": "2017-09-18T08:22:00Z", "noticeTime": "now"}'

    def __init__(self, tokens: str = "required") -> None:
        super().__init__()
        self.tokens = tokens
        self.issued: dict[str, float] = {}
        self.refused = 0
        self.events: dict[str, str] = {}
        self.lock = threading.Lock()

    def spot(self, **event: Any) -> None:
        self.events["/latest/meta-data/spot/instance-action"] = json.dumps(event)

    def rebalance(self, **event: Any) -> None:
        self.events["/latest/meta-data/events/recommendations/rebalance"] = json.dumps(event)

    def answer(self, handler: _Handler) -> None:
        if handler.path == "/latest/api/token":
            self._give_token(handler)
        elif not self._admits(handler.headers.get("X-aws-ec2-metadata-token")):
            self.refused += 1
            handler.reply(401, HTML)
        elif handler.path in self.events:
            handler.reply(200, self.events[handler.path])
        else:
            handler.reply(404, HTML)

    def _give_token(self, handler: _Handler) -> None:
        if self.tokens == "absent":
            handler.reply(404, HTML)
            return
        seconds = handler.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if handler.command != "PUT":
            handler.reply(405, HTML)
        elif handler.headers.get("X-Forwarded-For"):
            handler.reply(403, HTML)
        elif not seconds.isdigit() or not 1 <= int(seconds) <= 21600:
            handler.reply(400, HTML)
        else:
            with self.lock:
                token = f"AQAEA{len(self.issued)}=="
                self.issued[token] = time.monotonic() + int(seconds)
            handler.reply(200, token)

    def _admits(self, token: str | None) -> bool:
        if token is None:
            return self.tokens != "required"
        return self.tokens == "absent" or self.issued.get(token, 0) > time.monotonic()


class AzureServer(MetadataServer):
    """Microsoft's: one document with the events of all machines of a group."""

    tempting = '{"Events": [{"EventId": "1", "EventType": "Preempt", "NotBefore": ""}]}'

    def __init__(self, name: str = "trainer_0") -> None:
        super().__init__()
        self.name = name
        self.events: list[dict[str, Any]] = []
        self._incarnation = itertools.count(1)

    def schedule(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {
            "EventId": f"C7061BAC-{next(self._incarnation)}",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": [self.name],
            "EventStatus": "Scheduled",
            "NotBefore": "",
            "Description": "",
            "EventSource": "Platform",
            **fields,
        }
        self.events = [*self.events, event]
        return event

    def answer(self, handler: _Handler) -> None:
        parts = urlsplit(handler.path)
        query = parse_qs(parts.query)
        if handler.headers.get("Metadata") != "true" or "api-version" not in query:
            handler.reply(400, '{"error": "Bad request"}')
        elif parts.path == "/metadata/scheduledevents" and handler.command == "GET":
            document = {"DocumentIncarnation": 1, "Events": self.events}
            handler.reply(200, json.dumps(document), Content_Type="application/json")
        elif parts.path == "/metadata/instance/compute/name" and query.get("format") == ["text"]:
            handler.reply(200, self.name)
        else:
            handler.reply(404, '{"error": "Not found"}')


class Desk:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.withdrawn: list[str] = []

    def tell(self, notice: Any) -> None:
        self.told.append(notice)

    def withdraw(self, source: str) -> None:
        self.withdrawn.append(source)

    def sources(self) -> list[str]:
        return sorted(notice.source for notice in self.told)


def watching_threads() -> set[threading.Thread]:
    return {
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("keras_safe_ckpt-notice")
    }
