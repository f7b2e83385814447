"""One process owns the file, and any number of others feed it: `CentralH5Writer`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from keras_safe_ckpt.datasets.feed import Feed
from keras_safe_ckpt.datasets.feed_folder import FeedFolder
from keras_safe_ckpt.datasets.feed_line import line_to
from keras_safe_ckpt.datasets.worker_files import unfinished_of
from keras_safe_ckpt.errors import CheckpointWriteError, LockTimeoutError, SafeCheckpointError
from keras_safe_ckpt.storage.error_facts import as_facts, from_facts
from keras_safe_ckpt.storage.journaled_file import journal_of
from keras_safe_ckpt.storage.lock_backend import checked_timeout
from keras_safe_ckpt.storage.paths import (
    absolute,
    make_directory,
    refuse_long_name,
    refuse_unsafe_target,
)

_log = logging.getLogger(__name__)

#: Not by ``-m``, which would look for modules in the working directory first.
_PROGRAM = """import sys; sys.path = [path for path in sys.path if path]
from keras_safe_ckpt.datasets.central_process import main; sys.exit(main())"""
#: A process that cannot write says so every second or so.
_TROUBLE_SECONDS = 5.0
#: A process that ends so often within a minute will not do better the next time.
_MOST_RESTARTS = 5
_RESTART_WINDOW_SECONDS = 60.0


class CentralH5Writer:
    """Starts a process that owns one HDF5 file; others append to it through `feed`.

    Args:
        path: the file. It is there, whole, after `close`; one that is there already is gone on
            with, in a copy, and so is what an interrupted writer of this path has left.
        timeout: seconds in which the process must be ready, and that `close` waits for a disk on
            which nothing can be written.

    The process is started again if it is killed. Each row that an append has returned for is in
    the file once, in the order of its feeder.

    Example::

        def simulate(feed, seed):  # in any process
            feed.append("reward", [np.random.default_rng(seed).normal()])

        with CentralH5Writer("statistics.h5") as writer:
            with multiprocessing.Pool(4) as pool:
                pool.starmap(simulate, [(writer.feed(), seed) for seed in range(100)])

    Close it when the feeders are done. If the block ends by an error the file is not published;
    what was appended is kept for the next writer of this path.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        self.path: Path = absolute(path)
        self._timeout = checked_timeout(timeout)
        refuse_unsafe_target(self.path)
        refuse_long_name(self.path, journal_of(unfinished_of(self.path)))
        make_directory(self.path.parent)
        self._folder = FeedFolder(self.path)
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._is_closing = False
        self._is_left = False
        self._failure: Exception | None = None
        self._trouble: _Trouble | None = None
        self._restarts: list[float] = []
        self._process = self._started("--new")
        self._guardian = threading.Thread(
            target=self._guard, name="keras_safe_ckpt-central", daemon=True
        )
        self._guardian.start()

    def feed(self) -> Feed:
        """A handle for any process of this machine; it can be pickled and inherited."""
        return Feed(self.path)

    @property
    def pid(self) -> int:
        """The process that owns the file at the moment."""
        return self._process.pid

    def close(self) -> None:
        """Drain all feeders and publish the file. Nothing happens if that was done before.

        If the disk is full for longer than ``timeout`` this raises what is wrong, and the process
        goes on trying; make room, and call it again.
        """
        if self._pid != os.getpid() or self._is_closing:
            return
        began, is_said = time.monotonic(), False
        while self._guardian.is_alive():
            try:
                if not is_said:
                    self._folder.write("closed", {})
                    is_said = True
            except CheckpointWriteError:
                # A full disk; or it has published meanwhile, and its folder is gone.
                if time.monotonic() - began > self._timeout and self._guardian.is_alive():
                    raise
            self._guardian.join(0.1)
            trouble = self._trouble
            if trouble is not None and trouble.lasted(began) > self._timeout:
                raise trouble.error
        if self._failure is not None:
            raise self._failure
        self._is_closing = True
        line = line_to(self.path)
        with line.mutex:
            line.drop()  # Nobody reads what this process might still say.

    def abandon(self) -> None:
        """Do not publish: the process takes what is there, and leaves the rest to the next one."""
        if self._pid != os.getpid() or self._is_closing:
            return
        self._is_closing = True
        with self._mutex:
            self._is_left = True
            _leave(self._process.stdin)
        self._guardian.join()

    def __enter__(self) -> CentralH5Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def _started(self, *options: str) -> subprocess.Popen[str]:
        """A process that is ready, or the error that keeps it from that."""
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(self.path), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C is for the program, which closes or abandons the file then.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_search_path())},
        )
        answer: list[str] = []
        assert process.stdout is not None
        listener = threading.Thread(target=_hear, args=(process.stdout, answer), daemon=True)
        listener.start()
        listener.join(min(self._timeout, threading.TIMEOUT_MAX))
        if answer and answer[0] == "ready\n":
            return process
        is_late = not answer
        process.kill()
        code = process.wait()
        listener.join()
        if answer[0].startswith("{"):
            raise from_facts(json.loads(answer[0]))
        outcome = (
            f"was not ready within {self._timeout:g} s" if is_late else f"ended with code {code}"
        )
        raise SafeCheckpointError(f"The process that is to write {str(self.path)!r} {outcome}.")

    def _guard(self) -> None:
        """Until the process has come to its end; start it again if something ended it before."""
        try:
            while True:
                self._listen(self._process.stdout)
                code = self._process.wait()
                if code == 0:
                    return
                if self._has_left():
                    _log.warning("The writer of %s ended with code %s", self.path, code)
                    return
                _log.warning(
                    "The writer of %s ended with code %s: starting it again", self.path, code
                )
                self._count_restart(code)
                process = self._started()
                with self._mutex:
                    self._process = process
                    if self._has_left():
                        _leave(process.stdin)
        except Exception as error:  # noqa: BLE001  # `close` raises it, and the feeders hear it
            self._failure = error
            if isinstance(error, LockTimeoutError):
                return  # Somebody else owns the file, and has feeders of its own.
            try:
                self._folder.write("failed", as_facts(error))
            except CheckpointWriteError as another:
                _log.warning("The feeders of %s cannot be told: %s", self.path, another)

    def _has_left(self) -> bool:
        return self._is_left  # May be set by another thread between two looks.

    def _listen(self, pipe: IO[str] | None) -> None:
        """Errors that the process tries to overcome, or that end it; until it has ended."""
        for line in pipe or ():
            if not line.startswith("{"):
                continue
            error = from_facts(json.loads(line))
            before = self._trouble
            is_same = before is not None and before.is_recent()
            began = before.began if before is not None and is_same else time.monotonic()
            self._trouble = _Trouble(error, began, time.monotonic())

    def _count_restart(self, code: int) -> None:
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < _RESTART_WINDOW_SECONDS]
        self._restarts.append(now)
        if len(self._restarts) > _MOST_RESTARTS:
            if self._trouble is not None and self._trouble.is_recent():
                raise self._trouble.error
            raise SafeCheckpointError(
                f"The process that writes {str(self.path)!r} has ended {len(self._restarts)} times "
                f"within a minute, now with code {code}. What was appended is kept."
            )


def _hear(pipe: IO[str], answer: list[str]) -> None:
    """The first line that is meant for us; others may come from whatever Python runs first."""
    for line in pipe:
        if line == "ready\n" or line.startswith("{"):
            answer.append(line)
            return
    answer.append("")


def _search_path() -> list[str]:
    # Python passes over what is no text.
    return [path for path in sys.path if isinstance(path, str) and path]


@dataclass(frozen=True)
class _Trouble:
    """What the process cannot do, since when, and when it said so."""

    error: Exception
    began: float
    said: float

    def is_recent(self) -> bool:
        return time.monotonic() - self.said < _TROUBLE_SECONDS

    def lasted(self, since: float) -> float:
        return time.monotonic() - max(self.began, since) if self.is_recent() else 0.0


def _leave(pipe: IO[str] | None) -> None:
    """Say that there is nobody any more; a forked child may have the pipe open, too."""
    if pipe is not None and not pipe.closed:
        with contextlib.suppress(OSError):
            pipe.write("left")
            pipe.close()
