"""Let the disk begin with what was written, so that the sync in the end has little left to do."""

from __future__ import annotations

import _thread
import os
import threading

_STEP_BYTES = 16 << 20


class EarlySync:
    """Syncs a file on a thread of its own, after each so many bytes. It replaces no fsync."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = 0
        self._is_done = threading.Event()
        self._is_done.set()
        self._error: OSError | None = None

    def add(self, count: int) -> None:
        """So many bytes were written."""
        self._waiting += count
        if self._waiting < _STEP_BYTES or not self._is_done.is_set():
            return
        self._is_done.clear()
        try:
            # Not a `threading.Thread`, whose start is waited for: this may be a call of HDF5's,
            # which holds h5py's lock, and garbage that the new thread comes by may need that.
            _thread.start_new_thread(self._sync, ())
        except RuntimeError:
            self._is_done.set()
            return  # An interpreter that is shutting down starts no threads; nothing is lost.
        self._waiting = 0

    def finish(self) -> None:
        """Wait for what was begun; raise what the disk has said."""
        self._is_done.wait()
        # The kernel tells each error once: the sync that follows would not hear of it.
        if self._error is not None:
            raise self._error

    def _sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._error = error
        finally:
            self._is_done.set()
