"""``events.jsonl``: what happened to the checkpoints of a directory, one line each."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_safe_ckpt.storage.plain_values import plain_values

if TYPE_CHECKING:
    from keras_safe_ckpt.storage.manifest import Manifest

FILE_NAME = "events.jsonl"

#: Is told of each event on the thread that records it; it must neither raise nor take long.
Listener = Callable[[Mapping[str, Any]], None]

#: A shorter wait for a save is not worth a line.
_WORTH_SAYING_SECONDS = 0.001

#: No event is longer; of a file that is something else not all is held in memory.
_LONGEST_LINE = 1 << 20

_log = logging.getLogger(__name__)

#: Since when this process has the library. In containers that are started again host and process
#: id are the same each time; together with this they name one process.
_started = 0.0


def _note_start() -> None:
    global _started
    _started = math.floor(time.time() * 1e3) / 1e3


_note_start()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_start)


class EventLog:
    """Append events to a directory's log; any number of processes may at once."""

    def __init__(self, directory: Path, listener: Listener | None = None) -> None:
        self.path = directory / FILE_NAME
        self.listener = listener
        self._complained = False

    def record(self, event: str, **facts: Any) -> None:
        """Write one line. A log that cannot be written is said once and stops nothing."""
        entry = {
            "event": event,
            "time": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _started,
            **facts,
        }
        line = f"{json.dumps(plain_values(entry))}\n".encode()
        try:
            self._append(line)
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.warning("Cannot write %s (%s); events are lost.", self.path, error)
        if self.listener is not None:
            self.listener(entry)

    @contextlib.contextmanager
    def waiting(self, **facts: Any) -> Iterator[None]:
        """Around whatever keeps training waiting for a save: the time goes to the log."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            if seconds >= _WORTH_SAYING_SECONDS:
                self.record("wait", **facts, seconds=seconds)

    def report_skip(self, path: Path, reason: str) -> None:
        """Say that a checkpoint was passed over, in the log of the program as well."""
        _log.warning("Passed over %s: %s", path.name, reason)
        self.record("pass_over", file=path.name, reason=reason)

    def report_restore(self, path: Path, manifest: Manifest, seconds: float) -> None:
        """Say that a checkpoint was loaded."""
        self.record("restore", **position(manifest, path.name), seconds=seconds)

    def read(self, on_broken: Callable[[], None] = lambda: None) -> Iterator[dict[str, Any]]:
        """All events, oldest first; lines that are not whole are left out, and told of."""
        try:
            # What is no file (a pipe) would be waited for.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return
                while line := file.readline(_LONGEST_LINE):
                    try:
                        entry = json.loads(line)
                    except (ValueError, RecursionError):
                        entry = None
                    if isinstance(entry, dict):
                        yield entry
                    elif not line.isspace():  # One that was cut leaves an empty line behind it.
                        on_broken()
        except FileNotFoundError:
            return

    def _append(self, line: bytes) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # A full disk cut the line before: keep it from eating ours.
            while line:  # A disk that is nearly full takes a part, and says so of the rest.
                line = line[os.write(descriptor, line) :]
        finally:
            os.close(descriptor)


def saves_in(directory: Path) -> dict[str, dict[str, Any]]:
    """The last save of each file, by its name, as far as the log can be read."""
    try:
        return {
            event["file"]: event
            for event in EventLog(directory).read()
            if event.get("event") == "save" and isinstance(event.get("file"), str)
        }
    except OSError:
        return {}  # It is of use where it can be read, and needed nowhere.


def position(manifest: Manifest, name: str) -> dict[str, Any]:
    """The facts that each event about a checkpoint has."""
    return {
        "file": name,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "batch": manifest.batch,
    }
