"""Write one chunk while the next one is being prepared."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType


class OverlappedWriter:
    """Hands chunks to ``write`` on a thread of its own, in order, at most two ahead.

    The checksum of a chunk and the system call that writes the one before then run at the same
    time: both leave the interpreter free. An error of ``write`` is raised by a later call, at the
    latest by `drain`. The chunks must stay unchanged until then.
    """

    def __init__(self, write: Callable[[memoryview], object]) -> None:
        self._write = write
        self._queue: queue.Queue[memoryview | None] = queue.Queue(maxsize=2)
        self._error: BaseException | None = None
        # A daemon: a Ctrl-C at the wrong moment may leave it without anybody who ends it, and
        # the program must end all the same. Whoever saves waits for it by `drain`.
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="keras_safe_ckpt-write", daemon=True
        )

    def __enter__(self) -> OverlappedWriter:
        assert self._thread is not None
        try:
            self._thread.start()
        except RuntimeError:
            # An interpreter that is shutting down starts no threads, and the save that it
            # waits for must still be finished: one thing after the other, then.
            self._thread = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def write(self, chunk: memoryview) -> None:
        """Write ``chunk`` after those before it, soon."""
        self._raise_error()
        if self._thread is None:
            self._write(chunk)
        else:
            self._queue.put(chunk)

    def drain(self) -> None:
        """Return when everything is written."""
        self._queue.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        chunk: memoryview | None = memoryview(b"")
        while chunk is not None:
            chunk = self._queue.get()
            try:
                if chunk is not None and self._error is None:
                    self._write(chunk)
            except BaseException as error:  # noqa: BLE001  # not swallowed: raised by the next call
                self._error = error
            finally:
                self._queue.task_done()
