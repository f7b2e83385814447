"""Write one block while the next one is being filled."""

from __future__ import annotations

import queue
import threading
from typing import Protocol


class BlockSink(Protocol):
    """Where blocks go, on the thread that writes them."""

    def write(self, offset: int, block: memoryview) -> None:
        """Write all of it."""

    def close(self) -> None:
        """Nothing more will come."""


class OverlappedWriter:
    """Hands blocks to ``sink`` on a thread of its own, one at a time, in order.

    Filling a block (and hashing what goes into it) and the system call that writes the one before
    then run at the same time: both leave the interpreter free. An error is raised by the next
    call, and nothing is written after it. A block must stay unchanged until the next call returns.
    """

    def __init__(self, sink: BlockSink) -> None:
        self._sink = sink
        self._queue: queue.Queue[tuple[int, memoryview] | None] = queue.Queue()
        self._error: BaseException | None = None
        # A daemon: a Ctrl-C at the wrong moment may leave it without anybody who ends it, and
        # the program must end all the same. Whoever saves waits for it by `drain`.
        thread = threading.Thread(target=self._run, name="keras_safe_ckpt-write", daemon=True)
        self._thread: threading.Thread | None = thread
        try:
            thread.start()
        except RuntimeError:
            # An interpreter that is shutting down starts no threads, and the save that it
            # waits for must still be finished: one thing after the other, then.
            self._thread = None

    def write(self, offset: int, block: memoryview) -> None:
        """Begin to write ``block``; the one before is written when this returns."""
        self.drain()
        if self._thread is None:
            self._sink.write(offset, block)
        else:
            self._queue.put((offset, block))

    def drain(self) -> None:
        """Return when everything is written."""
        self._queue.join()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread and close the sink, when what was begun is written."""
        if self._thread is None:
            self._sink.close()
        else:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (block := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._sink.write(*block)
            except BaseException as error:  # noqa: BLE001  # not swallowed: raised by the next call
                self._error = error
            finally:
                self._queue.task_done()
        self._sink.close()
