"""Signals as notices: noticed in the handler, acted upon elsewhere, never swallowed."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from keras_safe_ckpt.preemption.notices import Desk, Notice

_log = logging.getLogger(__name__)

#: Kubernetes gives a pod so long between SIGTERM and SIGKILL, SLURM (KillWait) and GCP as well.
DEFAULT_GRACE_SECONDS = 30.0

#: A signal to a job comes twice where its launcher forwards it: srun does. That is one notice.
ECHO_SECONDS = 0.5

_said_off_main_thread = False

#: Those that watch now, of this process.
_watching: list[SignalWatcher] = []
_masks = threading.local()


def _before_fork() -> None:
    # Python forgets what a child receives before it runs: kept back until the child is ready.
    numbers = [number for watcher in _watching for number in watcher.signals]
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers) if numbers else None


def _after_fork_in_parent() -> None:
    if _masks.before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    for watcher in reversed(_watching):
        watcher.give_back()
    _watching.clear()
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )


class SignalWatcher:
    """Takes the given signals for notices, while it watches.

    The first one of each kind is reported, and the handler that was there before is called, too;
    if that one wants to end the program, it has to wait until the checkpoint is there. A second
    one (other than an echo of the first), or one that comes when ``is_wanted(frame)`` says that
    nobody trains any more, has the effect that it had before. ``seconds(number)`` is how long the
    machine has after a signal.
    """

    name = "signals"

    def __init__(
        self,
        signals: Sequence[signal.Signals],
        *,
        seconds: Callable[[signal.Signals], float | None] = lambda number: DEFAULT_GRACE_SECONDS,
        is_wanted: Callable[[FrameType | None], bool] = lambda frame: True,
    ) -> None:
        self.signals = tuple(signals)
        self._seconds = seconds
        self._is_wanted = is_wanted
        self._previous: dict[int, Any] = {}
        #: The same, and still known when it watches no more: another watcher may have been
        #: started since, and calls this one before them.
        self._chain: dict[int, Any] = {}
        self._is_stopped = False
        #: When the first one of each kind came.
        self._received: dict[int, float] = {}
        self._desk: Desk | None = None
        self._news: deque[tuple[int, float]] = deque()
        #: What came, and whoever acts on it has not heard of to the end.
        self.unreported = 0
        self._reporting = threading.RLock()
        self._is_answered = False
        # Its put may be called in a signal handler, whatever the thread below it is doing.
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def start(self, desk: Desk) -> None:
        if threading.current_thread() is not threading.main_thread():
            if self.signals:
                _say_off_main_thread(self.signals)
            return
        if not self.signals:
            return
        self._received = {}
        self._is_answered = self._is_stopped = False
        self._desk = desk
        for number in self.signals:
            previous = signal.signal(number, self._receive)
            self._previous[number] = self._chain[number] = previous
        _watching.append(self)
        threading.Thread(
            target=self._report_on, name="keras_safe_ckpt-notice-signals", daemon=True
        ).start()

    def stop(self) -> None:
        """Give the signals back, unless somebody has taken them over meanwhile.

        One that came so late that nobody has acted on it has the effect now that it had before.
        """
        if not self._previous:
            return
        if self._received and self._is_answered:
            # An echo of what was acted on is not to have any other effect.
            time.sleep(max(0.0, self._received[self._last()] + ECHO_SECONDS - time.monotonic()))
        self._is_stopped = True
        if self in _watching:
            _watching.remove(self)
        if threading.current_thread() is threading.main_thread():
            self.give_back()
        self._wake.put(False)
        if self._received and not self._is_answered:
            os.kill(os.getpid(), self._last())

    def give_back(self) -> None:
        """The handlers that were there before, on the main thread; a forked child has them, too."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._receive:
                previous = _still_watching(number, previous)
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous.clear()

    def hand_over(self, handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
        """Let ``handler`` have the signals from now on; returns the handlers that were there."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        former, self._previous = self._previous, {}
        taken = {
            number: previous
            for number, previous in former.items()
            if signal.getsignal(number) == self._receive
        }
        for number in taken:
            signal.signal(number, handler)
        if self in _watching:
            _watching.remove(self)
        self._wake.put(False)
        return taken

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def before(self, number: int) -> Any:
        """The handler that was there before this watcher."""
        return self._chain.get(number)

    def answered(self) -> None:
        """What came is being acted on."""
        self._is_answered = True

    def fall_through(self) -> None:
        """The notice was not answered: let the signal do what it did before; from any thread."""
        number = self._last() if self._received else None
        if number is None or number not in self._previous:
            return
        _log.error(
            "%s was not answered in time; it has the effect now that it had before.",
            signal.Signals(number).name,
        )
        self._have_the_former_effect(number, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._is_stopped or not self._is_wanted(frame):
            self._have_the_former_effect(number, frame)
        elif number not in self._received:
            # Another one than before is news, too: SLURM warns by SIGUSR1, and then means it.
            self._received[number] = now
            self.unreported += 1
            self._news.append((number, now))
            self._wake.put(True)
            self._call_former_handler(number, frame)
        elif now - self._received[number] > ECHO_SECONDS:
            self._have_the_former_effect(number, frame)

    def _last(self) -> int:
        return max(self._received, key=self._received.__getitem__)

    def _call_former_handler(self, number: int, frame: FrameType | None) -> None:
        previous = self._chain.get(number)
        if not callable(previous) or previous is signal.default_int_handler:
            return
        try:
            previous(number, frame)
        except (SystemExit, KeyboardInterrupt) as end:
            _log.info("The former handler of %s ends the program (%r) after the save.", number, end)
        except Exception:  # noqa: BLE001  # logged
            # It would go through `fit`, and there would be no checkpoint of this batch.
            _log.exception("The former handler of signal %s has failed; it stops nothing.", number)

    def _have_the_former_effect(self, number: int, frame: FrameType | None) -> None:
        previous = self._chain.get(number, signal.SIG_DFL)
        if previous is signal.SIG_IGN:
            return
        if callable(previous):
            if threading.current_thread() is threading.main_thread():
                previous(number, frame)
                return
            try:
                previous(number, frame)
            except SystemExit as end:
                # On this thread it would end nothing but the thread.
                end_now(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
            except KeyboardInterrupt:
                end_now(128 + signal.SIGINT)
            return
        end_by_signal(number)

    def report(self) -> None:
        """Report what came, or wait until the other thread, which began to, has done so."""
        with self._reporting:
            while self._news and self._desk is not None:
                number, received = self._news.popleft()
                which = signal.Signals(number)
                seconds = self._seconds(which)
                deadline = None if seconds is None else received + seconds
                try:
                    self._desk.tell(Notice(which.name, "received", deadline, received=received))
                finally:
                    self.unreported -= 1

    def _report_on(self) -> None:
        # Not in the handler, under which anything may be locked.
        while self._wake.get():
            self.report()


def _still_watching(number: int, handler: Any) -> Any:
    """The handler, or if it is one of a watcher that was stopped, the one before that."""
    while isinstance(getattr(handler, "__self__", None), SignalWatcher):
        watcher: SignalWatcher = handler.__self__
        if not watcher.is_stopped:
            break
        handler = watcher.before(number)
    return handler


def end_by_signal(number: int) -> None:
    """End this process as the signal does by default, whatever the main thread is doing."""
    _flush()
    # Python lets only the main thread change a handler, and that one may hang for ever.
    libc = ctypes.CDLL(None) if sys.platform != "win32" else None
    if libc is not None:
        libc.signal(number, 0)
        os.kill(os.getpid(), number)
        time.sleep(1.0)  # Another thread of this process may have to take it.
    os._exit(128 + number)


def end_now(code: int) -> None:
    """End this process without waiting for anything but its output."""
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError, RuntimeError):
            # Closed, not a stream any more, or in the middle of a print that this handler has
            # interrupted: there is nothing to flush, and that must not keep anything from its end.
            continue


def _say_off_main_thread(signals: Sequence[signal.Signals]) -> None:
    global _said_off_main_thread
    if not _said_off_main_thread:
        _said_off_main_thread = True
        names = ", ".join(number.name for number in signals)
        _log.warning(
            "Training does not run on the main thread, the only one that Python lets handle "
            "signals: %s will not be noticed (other notices will).",
            names,
        )
