"""Let the disk begin with what was written, so that the sync in the end has little left to do."""

from __future__ import annotations

import os
import threading

_STEP_BYTES = 16 << 20


class EarlySync:
    """Syncs a file on a thread of its own, after each so many bytes. It replaces no fsync."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def add(self, count: int) -> None:
        """So many bytes were written."""
        self._waiting += count
        if self._waiting < _STEP_BYTES or (self._thread is not None and self._thread.is_alive()):
            return
        thread = threading.Thread(target=self._sync, name="keras_safe_ckpt-sync", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # An interpreter that is shutting down starts no threads; nothing is lost.
        self._thread, self._waiting = thread, 0

    def finish(self) -> None:
        """Wait for what was begun; raise what the disk has said."""
        if self._thread is not None:
            self._thread.join()
        # The kernel tells each error once: the sync that follows would not hear of it.
        if self._error is not None:
            raise self._error

    def _sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._error = error
