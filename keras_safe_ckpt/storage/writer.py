"""One background thread at a time, one save in flight, no error lost."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_writers: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for writer in list(_writers):
        writer.forget_parent()


def wait_for_all_writers() -> None:
    """Return when no save of this process is pending; the errors stay with their writers."""
    for writer in list(_writers):
        writer.wait_until_idle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class BackgroundWriter:
    """Run saves in the background, one after the other.

    A second save waits for the first, so that memory holds one snapshot at the most. An error
    comes back at the next call of any method. The thread lives only as long as its save and is
    not a daemon: the interpreter waits for it at exit, also after an exception. `run` does the
    same and waits::

        writer = BackgroundWriter()
        writer.submit(lambda: write_atomically("notes.txt", b"..."))
        writer.wait()
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._turn = threading.Lock()
        # Waited for instead of joining the thread: a Ctrl-C during a join makes Python (to 3.12)
        # take a running thread for finished, and the interpreter would not wait for it at exit.
        self._idle = threading.Event()
        self._idle.set()
        _writers.add(self)

    def submit(self, save: Callable[[], object]) -> None:
        """Begin ``save``; wait for the one before, and raise what it raised."""
        with self._turn:
            self._finish()
            if not threading.main_thread().is_alive():
                # The program is ending and has waited for its threads: nobody would for this one.
                save()
                return
            begun = threading.Lock()
            # Said, since a thread that a daemon starts is a daemon otherwise.
            thread = threading.Thread(
                target=self._run, args=(save, begun), name="keras_safe_ckpt-save", daemon=False
            )
            try:
                self._idle.clear()
                thread.start()
            except BaseException:
                # No thread to be had, or Ctrl-C while it was started: whoever takes this lock
                # decides whether the save begins, so that nobody waits for one that never does.
                if begun.acquire(blocking=False):
                    self._idle.set()
                raise

    def run(self, save: Callable[[], _Result]) -> _Result:
        """Return when ``save`` is done, and what it returns; raise what it raises.

        A Ctrl-C ends the wait at once, not the save: Python interrupts the main thread only, so
        from there the save is done on another one, as if it were in the background.
        """
        if threading.current_thread() is not threading.main_thread():
            self.wait()
            return save()
        results: list[_Result] = []
        errors: list[BaseException] = []
        left = threading.Event()

        def job() -> None:
            try:
                results.append(save())
            except BaseException as error:
                errors.append(error)
                if left.is_set():  # Then it is an error of the background.
                    raise

        try:
            self.submit(job)
            self._idle.wait()
        except BaseException:
            left.set()
            if errors:  # It failed just before: nobody else knows.
                self._error = errors[0]
            raise
        self.raise_error()
        if errors:
            raise errors[0]
        return results[0]

    def wait(self) -> None:
        """Return when nothing is pending; raise what the last save raised."""
        with self._turn:
            self._finish()

    def wait_until_idle(self) -> None:
        """Return when nothing is pending, whether it succeeded or not."""
        self._idle.wait()

    def raise_error(self) -> None:
        """Raise what an earlier save raised, without waiting for one that still runs."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def busy(self) -> bool:
        """Whether a save is being written now."""
        return not self._idle.is_set()

    def forget_parent(self) -> None:
        """In a forked child: the pending save, and whoever waits for it, are the parent's."""
        self._turn = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._error = None

    def _finish(self) -> None:
        self._idle.wait()
        self.raise_error()

    def _run(self, save: Callable[[], object], begun: threading.Lock) -> None:
        if not begun.acquire(blocking=False):
            return
        try:
            save()
        except BaseException as error:  # noqa: BLE001  # not swallowed: raised by the next call
            self._error = error
            # Said at once as well: a program that ends without another call would not hear it.
            _log.error("A save in the background failed: %s", error)
        finally:
            self._idle.set()

    def __getstate__(self) -> dict[str, object]:
        # A copy (as tuners make of callbacks) is a writer of its own, with nothing pending.
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]
