"""What one process has to say to the owner of one file: a single stream, in its order.

All handles of a process for the same file share it, also those that a pool unpickles for each task:
so the rows of a process keep their order, and the owner has few streams to listen to.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from keras_safe_ckpt.datasets.feed_folder import FeedFolder
from keras_safe_ckpt.datasets.frames import Message
from keras_safe_ckpt.datasets.spool import SpoolWriter
from keras_safe_ckpt.errors import CheckpointWriteError
from keras_safe_ckpt.storage.error_facts import from_facts
from keras_safe_ckpt.storage.paths import refuse_linked_directory
from keras_safe_ckpt.storage.temp_names import new_temp_name

#: How much a feeder may be ahead of what is in the file.
_MOST_AHEAD_BYTES = 64 << 20
_FIRST_POLL_SECONDS = 0.0005
_LAST_POLL_SECONDS = 0.02

_UNKNOWN = "; whether these rows are still in it is not known"

Kind = tuple[np.dtype[Any], tuple[int, ...]]


class FeedLine:
    """Use it under its mutex. A forked child gets another one from `line_to`."""

    def __init__(self, target: Path) -> None:
        self.mutex = threading.RLock()
        #: The type and the shape of rows of each dataset that was asked for.
        self.known: dict[str, Kind] = {}
        #: The compression that was asked for.
        self.asked: dict[str, str | int | None] = {}
        self._target = target
        self._folder = FeedFolder(target)
        self._stream = ""
        self._spool: SpoolWriter | None = None
        self._committed = 0
        self._heard = 0

    def open(self) -> None:
        """Begin a stream, unless there is one that the owner still reads."""
        if self._spool is not None and not self._spool.is_there():
            self.drop()  # Of a writer that was closed, with all that was appended.
        if self._spool is None:
            self._folder.refuse_closed()
            self._stream = new_temp_name("feed")
            try:
                self._spool = SpoolWriter(self._folder.path, self._stream)
            except FileNotFoundError:
                self._folder.raise_closed()
            except OSError as error:
                refuse_linked_directory(self._folder.path)
                raise CheckpointWriteError(self._target, error) from error
            self._committed = self._heard = 0

    def drop(self) -> None:
        """The stream is over: its writer is."""
        spool, self._spool = self._spool, None
        self.known.clear()
        self.asked.clear()
        if spool is not None:
            spool.rest()

    def rest(self) -> None:
        """Let go of the files; the stream is gone on with when there is more to say."""
        if self._spool is not None:
            self._spool.rest()

    @property
    def is_open(self) -> bool:
        return self._spool is not None

    def send(self, message: Message, timeout: float) -> int:
        """When it returns the message will be heard, whatever happens to this process.

        How much was said in all, this included.
        """
        spool = self._opened()
        self._folder.refuse_closed()
        size = self._said(spool)
        if size - self._committed > _MOST_AHEAD_BYTES:
            self._wait(lambda reply: size - reply["committed"] <= _MOST_AHEAD_BYTES, timeout)
        try:
            spool.write(message)
        except FileNotFoundError:
            self._end()
        except OSError as error:
            raise CheckpointWriteError(self._target, error) from error
        # Whoever closes looks through all streams after it has said so: what was written before
        # that is in the file.
        size = self._said(spool, _UNKNOWN)
        if self._folder.is_closed() or not spool.is_there():
            self._end(_UNKNOWN)
        return size

    def _said(self, spool: SpoolWriter, more: str = "") -> int:
        """How much was said in all; its file is made when that is asked first."""
        try:
            return spool.size
        except FileNotFoundError:
            self._end(more)
        except OSError as error:
            raise CheckpointWriteError(self._target, error) from error
        raise AssertionError("_end raises")

    def ask(self, message: Message, timeout: float) -> Kind:
        """Send it, and wait for what the owner says to it: an error, or what the dataset is."""
        size = self.send(message, timeout)
        reply = self._await(lambda reply: reply["asked"].get("size") == size, timeout)
        if reply is None:
            self._end(_UNKNOWN)
        assert reply is not None
        asked = reply["asked"]
        if asked["error"]:
            raise from_facts(asked["error"])
        dtype = np.dtype(object) if asked["dtype"] == "text" else np.dtype(asked["dtype"])
        return dtype, tuple(asked["shape"])

    def flush(self, timeout: float) -> None:
        """Until all that was said is in the file, durable."""
        if not self._opened().is_there():
            self.drop()
            return
        size = self.send(Message(), timeout)
        if self._await(lambda reply: reply["committed"] >= size, timeout) is None:
            self.drop()  # The writer was closed meanwhile, with all that was appended.

    def _opened(self) -> SpoolWriter:
        assert self._spool is not None
        return self._spool

    def _end(self, more: str = "") -> None:
        self.drop()
        self._folder.raise_closed(more)

    def _wait(self, is_there: Callable[[dict[str, Any]], bool], timeout: float) -> None:
        if self._await(is_there, timeout) is None:
            self._end()

    def _await(
        self, is_there: Callable[[dict[str, Any]], bool], timeout: float
    ) -> dict[str, Any] | None:
        """The reply of the owner that one waits for; an error if it does nothing for too long.

        None if it was closed: then there is nothing any more, not even the reply.
        """
        pause, deadline = _FIRST_POLL_SECONDS, time.monotonic() + timeout
        while True:
            is_over = self._spool is None or not self._spool.is_there()
            reply = self._folder.reply(self._stream)
            if reply["committed"] > self._committed:
                self._committed = reply["committed"]
                deadline = time.monotonic() + timeout
            self._hear_rejection(reply)
            if is_there(reply):
                return reply
            if is_over:
                return None
            self._folder.raise_failure()
            if time.monotonic() > deadline:
                raise CheckpointWriteError(
                    self._target,
                    f"the writer has not come forward for {timeout:g} s "
                    f"({self._folder.described()}); rows that were appended before are kept for "
                    "the next CentralH5Writer of this path",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)

    def _hear_rejection(self, reply: dict[str, Any]) -> None:
        """Rows for which an append has returned, and which HDF5 would not take: said once."""
        number, facts = reply.get("rejected") or (0, {})
        if number > self._heard:
            self._heard = number
            raise from_facts(facts)


#: By the process as well: a forked child has those of its parent in here. Their files are not
#: closed: the numbers may mean others there by now.
_lines: dict[tuple[int, Path], FeedLine] = {}


def line_to(target: Path) -> FeedLine:
    """The one of this process."""
    key = (os.getpid(), target)
    line = _lines.get(key)
    # Two threads may come here at once, and both get the same one.
    return line if line is not None else _lines.setdefault(key, FeedLine(target))
