"""The process that owns the file of a `CentralH5Writer`; its argument is the path.

It writes ``ready`` to its standard output, or an error as JSON. What the disk or the memory has no
room for is tried again until it has.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import time
from pathlib import Path

from keras_safe_ckpt.datasets.central_file import CentralFile
from keras_safe_ckpt.datasets.feed_folder import FeedFolder
from keras_safe_ckpt.datasets.growing_file import clear_journal
from keras_safe_ckpt.datasets.worker_files import unfinished_of
from keras_safe_ckpt.errors import CheckpointWriteError
from keras_safe_ckpt.storage.error_facts import as_facts
from keras_safe_ckpt.storage.locks import LockManager
from keras_safe_ckpt.storage.paths import absolute

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_LOCK_SECONDS = 10.0


class Starter:
    """The program for which this process works."""

    def __init__(self) -> None:
        self._pid = os.getppid()

    def has_left(self) -> bool:
        """Whether it has said so on the pipe, or has ended."""
        # A child that it has forked may have its end of the pipe open for long.
        if os.getppid() != self._pid:
            return True
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], 0)
        return bool(readable)  # Nothing is read: it stays so.


def _work(target: Path, is_new: bool, starter: Starter) -> None:
    """Until the end, and through times in which the disk is full."""
    folder = FeedFolder(target)
    folder.sweep()
    # One that is started again has been ready before: what is wrong now is waited out.
    is_ready = not is_new
    if is_ready:
        _say("ready")
    while True:
        try:
            _end_what_was_closed(folder, starter)
            if is_ready and not folder.path.exists():
                return  # It was published, and nothing else is left to do.
            folder.make()
            if not is_ready:
                for marker in ("closed", "failed"):
                    folder.remove(marker)
            file = CentralFile(target, starter.has_left)
        except (CheckpointWriteError, MemoryError) as error:
            if not is_ready:
                raise
            _wait_out(target, error, starter)
            continue
        if not is_ready:
            _say("ready")
            is_ready = True
        try:
            if file.run():
                file.publish()
            return
        except (CheckpointWriteError, MemoryError) as error:
            _wait_out(target, error, starter)
        finally:
            file.close()


def _end_what_was_closed(folder: FeedFolder, starter: Starter) -> None:
    """The one before had come to the end of all streams: what is left to do is its publishing."""
    if not folder.has("drained"):
        return
    if unfinished_of(folder.target).exists():
        file = CentralFile(folder.target, starter.has_left)
        try:
            file.publish()
        finally:
            file.close()
    else:
        clear_journal(folder.target)  # The last thing but one that the one before did.
    folder.clear()


def _wait_out(target: Path, error: Exception, starter: Starter) -> None:
    """The rows wait in their streams; whoever waits for room there hears what is wrong."""
    _log.warning("Trying again: %s", error)
    _say(json.dumps(as_facts(error)))
    try:
        FeedFolder(target).write("trouble", as_facts(error))
    except CheckpointWriteError as another:
        _log.debug("Cannot even say so: %s", another)
    if starter.has_left():
        raise error
    time.sleep(_RETRY_SECONDS)


def _say(line: str) -> None:
    """To the starter, if it is still there."""
    with contextlib.suppress(BrokenPipeError):
        print(line, flush=True)


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    starter = Starter()
    target, is_new = absolute(sys.argv[1]), "--new" in sys.argv[2:]
    try:
        with LockManager(timeout=_LOCK_SECONDS).exclusive(target):
            try:
                _work(target, is_new, starter)
            except Exception:
                FeedFolder(target).remove_if_empty()
                raise
    except Exception as error:  # noqa: BLE001  # for the process that started this one
        _say(json.dumps(as_facts(error)))
        return 1
    return 0
