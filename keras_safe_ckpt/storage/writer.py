"""One background thread at a time, one save in flight, no error lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class BackgroundWriter:
    """Run saves in the background, one after the other.

    A second save waits for the first, so that memory holds one snapshot at the most. An error
    comes back at the next call of any method. The thread lives only as long as its save and is
    not a daemon: the interpreter waits for it at exit, also after an exception::

        writer = BackgroundWriter()
        writer.submit(lambda: write_atomically("notes.txt", b"..."))
        writer.wait()
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._turn = threading.Lock()

    def submit(self, save: Callable[[], object]) -> None:
        """Begin ``save``; wait for the one before, and raise what it raised."""
        with self._turn:
            self._finish()
            thread = threading.Thread(target=self._run, args=(save,), name="keras_safe_ckpt-save")
            self._thread = thread
            try:
                thread.start()
            except BaseException:
                self._thread = None  # Never begun: there is nothing to wait for.
                raise

    def wait(self) -> None:
        """Return when nothing is pending; raise what the last save raised."""
        with self._turn:
            self._finish()

    def raise_error(self) -> None:
        """Raise what an earlier save raised, without waiting for one that still runs."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def busy(self) -> bool:
        """Whether a save is being written now."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_error()

    def _run(self, save: Callable[[], object]) -> None:
        try:
            save()
        except BaseException as error:  # noqa: BLE001  # not swallowed: raised by the next call
            self._error = error
            # Said at once as well: a program that ends without another call would not hear it.
            _log.error("A save in the background failed: %s", error)

    def __getstate__(self) -> dict[str, object]:
        # A copy (as tuners make of callbacks) is a writer of its own, with nothing pending.
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]
