"""Processes that are forked from one that has imported TensorFlow, and tell what they find.

A process with TensorFlow takes seconds to start; a forked one does not. The parent must have
imported TensorFlow and not used it: its threads do not survive a fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Tell = Callable[..., None]
#: The function is called with ``tell``, by which it sends facts to the parent, and the arguments.
Job = tuple[Callable[..., None], tuple[Any, ...]]
LIMIT_SECONDS = 600.0


class Child:
    """A forked process. What it prints goes to the end of ``log``."""

    def __init__(self, job: Job, log: Path) -> None:
        self.log = log
        self._rest = b""
        self._code: int | None = None
        self._reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of each fork; it is not used before.
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reading)
            _live(job, writing, log)
        os.close(writing)

    def fileno(self) -> int:
        return self._reading

    def hear(self, seconds: float = LIMIT_SECONDS) -> dict[str, Any] | None:
        """The next facts that it tells, or None when it has ended."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            if not select.select([self], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.kill()
                raise TimeoutError(f"Nothing was heard for {seconds:g} s.\n{self.last_words()}")
            found = os.read(self._reading, 1 << 16)
            if not found:
                return None
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\n")
        return dict(json.loads(line))

    def hear_all(self, seconds: float = LIMIT_SECONDS) -> dict[str, Any]:
        """All that it tells until it ends, in one."""
        facts: dict[str, Any] = {}
        while (message := self.hear(seconds)) is not None:
            facts.update(message)
        return facts

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.end()

    def end(self) -> int:
        """Wait for it; its exit code, or the negative number of the signal that ended it."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def close(self) -> None:
        self.kill()
        os.close(self._reading)

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-20:])


def _live(job: Job, writing: int, log: Path) -> None:
    """The whole life of a child; does not return."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # Whatever they were, in a test for instance.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def tell(**facts: Any) -> None:
            line = json.dumps(facts).encode() + b"\n"
            while line:
                line = line[os.write(writing, line) :]

        function, arguments = job
        function(tell, *arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001  # the parent sees the code, and the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def side_by_side(jobs: Iterable[Job], folder: Path, at_once: int) -> Iterator[dict[str, Any]]:
    """What all of them tell, as it comes; a job that fails is an error with its last words."""
    waiting = list(jobs)
    running: list[Child] = []
    begun = 0
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                begun += 1
                running.append(Child(waiting.pop(0), folder / f"job-{begun}.log"))
            for child in select.select(running, [], [], LIMIT_SECONDS)[0] or running:
                message = child.hear()
                if message is not None:
                    yield message
                    continue
                running.remove(child)
                code = child.end()
                child.close()
                if code != 0:
                    raise RuntimeError(f"A measurement ended with {code}.\n{child.last_words()}")
    finally:
        for child in running:
            child.close()
