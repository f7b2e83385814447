"""``events.jsonl``: what happened to the checkpoints of a directory, one line each."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras_safe_ckpt.storage.manifest import Manifest

FILE_NAME = "events.jsonl"

_log = logging.getLogger(__name__)


class EventLog:
    """Append events to a directory's log; any number of processes may at once."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self._complained = False

    def record(self, event: str, **facts: Any) -> None:
        """Write one line. A log that cannot be written is said once and stops nothing."""
        entry = {
            "event": event,
            "time": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **facts,
        }
        line = f"{json.dumps(entry, default=str)}\n".encode()
        try:
            self._append(line)
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.warning("Cannot write %s (%s); events are lost.", self.path, error)

    def report_skip(self, path: Path, reason: str) -> None:
        """Say that a checkpoint was passed over, in the log of the program as well."""
        _log.warning("Passed over %s: %s", path.name, reason)
        self.record("pass_over", file=path.name, reason=reason)

    def report_restore(self, path: Path, manifest: Manifest, seconds: float) -> None:
        """Say that a checkpoint was loaded."""
        self.record("restore", **position(manifest, path.name), seconds=seconds)

    def read(self) -> Iterator[dict[str, Any]]:
        """All events, oldest first; lines that are not whole are left out."""
        try:
            with open(self.path, "rb") as file:
                for line in file:
                    try:
                        entry = json.loads(line)
                    except (ValueError, RecursionError):
                        continue
                    if isinstance(entry, dict):
                        yield entry
        except FileNotFoundError:
            return

    def _append(self, line: bytes) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # A full disk cut the line before: keep it from eating ours.
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def position(manifest: Manifest, name: str) -> dict[str, Any]:
    """The facts that each event about a checkpoint has."""
    return {
        "file": name,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "batch": manifest.batch,
    }
