"""The way out of a program that was told to end: with its exit code, whatever comes in between."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, NoReturn

from keras_safe_ckpt.preemption.signals import ECHO_SECONDS, end_now

#: The one that this process is about to make, if it is.
_current: Departure | None = None


class Departure:
    """Ends the program with ``code``; a signal on the way does not change that.

    `on_signal` is the handler on the way, in place of the ``former`` ones.
    """

    def __init__(self, code: int) -> None:
        self.code = code
        self.former: Mapping[int, Any] = {}
        self._since = time.monotonic()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        # An echo of the first one says nothing new. Whoever sends another one wants no more
        # waiting (for a thread of the user's, say), and "start me again" stays the code.
        if time.monotonic() - self._since > ECHO_SECONDS:
            end_now(self.code)

    def go(self) -> NoReturn:
        """Raises `SystemExit`, on the main thread; elsewhere that would end the thread only."""
        global _current
        if threading.current_thread() is not threading.main_thread():
            end_now(self.code)
        _current = self
        end = _ProgramEnd(self.code)
        # Registered now, to be the first one called, which then calls the others.
        atexit.register(_end_before_teardown, end)
        raise end

    def stay(self) -> None:
        """It was not made after all: give the signals back."""
        for number, former in self.former.items():
            if signal.getsignal(number) == self.on_signal:
                signal.signal(number, signal.SIG_DFL if former is None else former)


def stay() -> None:
    """The program goes on, having caught the `SystemExit`: signals have their former effect."""
    global _current
    departure, _current = _current, None
    if departure is not None and threading.current_thread() is threading.main_thread():
        departure.stay()


class _ProgramEnd(SystemExit):
    """A `SystemExit` that knows whether it was the one that ended the interpreter."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self._code: Any = code
        self.ends_program = False

    @property
    def code(self) -> Any:
        """Whoever catches it asks from a frame of Python; the interpreter, at its end, does not."""
        try:
            sys._getframe(1)
        except ValueError:
            self.ends_program = True
        return self._code

    @code.setter
    def code(self, code: Any) -> None:
        self._code = code


def _end_before_teardown(end: _ProgramEnd) -> None:
    """Do all that Python does at the end of a program but take its objects apart.

    TensorFlow waits there for threads that read data by Python code, which cannot run any more:
    such a program would hang after its last checkpoint, and never be started again.
    """
    atexit.unregister(_end_before_teardown)
    run_others = getattr(atexit, "_run_exitfuncs", None)
    if end.ends_program and isinstance(end._code, int) and run_others is not None:
        run_others()
        end_now(end._code)
