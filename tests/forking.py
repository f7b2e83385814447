"""A process that has imported TensorFlow and forks: seconds less for each process of a test.

What is forked has the environment, a session and the output that it was started with; it runs its
script as its main program and ends as every Python process does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: More than any environment needs.
LARGEST_MESSAGE = 1 << 17
_PR_SET_PDEATHSIG = 1
_TENSORFLOW = ("keras", "tensorflow")
PROJECT = Path(__file__).resolve().parent.parent


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def fork_on_request(asking: socket.socket) -> dict[str, Any] | None:
    """Forks for whoever asks until that one is gone; in the child, returns what was asked for."""
    running: dict[int, int] = {}
    poll = select.poll()
    poll.register(asking, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in running:
                poll.unregister(descriptor)
                os.close(descriptor)
                pid = running.pop(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):  # Who asked may be gone by now.
                    asking.send(json.dumps({"ended": pid, "code": code}).encode())
                continue
            try:
                message, outputs, _, _ = socket.recv_fds(asking, LARGEST_MESSAGE, 3)
            except ConnectionResetError:  # Gone, without having heard of every end.
                return None
            if not message:
                return None
            pid = os.fork()
            if not pid:
                asking.close()
                for one in running:
                    os.close(one)
                return {**json.loads(message), "outputs": outputs}
            for output in outputs:
                os.close(output)
            descriptor = os.pidfd_open(pid)
            running[descriptor] = pid
            poll.register(descriptor, select.POLLIN)
            asking.send(json.dumps({"started": pid}).encode())


def begin(wanted: dict[str, Any]) -> None:
    """In the child: go on as if it had been started just now."""
    os.setsid()
    die_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, *wanted["outputs"])):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.chdir(wanted["cwd"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    # Else all would draw the same numbers, and workers agree by chance.
    random.seed()
    np.random.seed()
    interpreter, script, *arguments = wanted["command"]
    assert interpreter == sys.executable
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def serve(asking: socket.socket, modules: Sequence[str] = _TENSORFLOW) -> bool:
    """Imports them, then forks until nobody asks any more; in a child, true at its end."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # What is not touched is not copied either.
    wanted = fork_on_request(asking)
    if wanted is not None:
        begin(wanted)
    return wanted is not None


class Forking:
    """The process that forks, from the side of a test; it has imported ``modules``."""

    def __init__(self, environment: dict[str, str], modules: Sequence[str] = _TENSORFLOW) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number = theirs.fileno()
        command = [sys.executable, __file__, str(number), *modules]
        self._process = subprocess.Popen(command, env=environment, cwd=PROJECT, pass_fds=[number])
        theirs.close()
        self._codes: dict[int, int] = {}

    def start(
        self,
        environment: dict[str, str],
        script: Path,
        *arguments: object,
        prints_to: Path | None = None,
        cwd: Path = PROJECT,
    ) -> Forked:
        """Run the script in a forked process.

        What it prints goes to files next to the script, or next to ``prints_to`` and named alike.
        """
        command = [sys.executable, str(script), *map(str, arguments)]
        wanted = {"command": command, "env": environment, "cwd": str(cwd)}
        request = json.dumps(wanted).encode()
        files = [(prints_to or script).with_suffix(suffix) for suffix in (".out", ".err")]
        with open(files[0], "w") as out, open(files[1], "w") as err:
            socket.send_fds(self._socket, [request], [out.fileno(), err.fileno()])
        while True:
            started = self._hear()
            if started is not None:
                return Forked(self, started, files)

    def _hear(self) -> int | None:
        """Which process was started, or none if it is the end of one that is said."""
        message = json.loads(self._socket.recv(LARGEST_MESSAGE))
        if "started" in message:
            return int(message["started"])
        self._codes[message["ended"]] = message["code"]
        return None

    def code_of(self, pid: int, seconds: float) -> int | None:
        """The exit code as soon as there is one, or none."""
        deadline = time.monotonic() + seconds
        while pid not in self._codes:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return None
            self._hear()
        return self._codes[pid]

    def close(self) -> None:
        """Ends the process, and all that it has forked."""
        self._socket.close()
        self._process.wait(30)


class Forked:
    """A forked process, as if it were one of `subprocess`."""

    def __init__(self, forking: Forking, pid: int, files: list[Path]) -> None:
        self._forking = forking
        self._files = files
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0)

    def _ended(self, seconds: float) -> int | None:
        self.returncode = self._forking.code_of(self.pid, seconds)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # It may end in between; that it has is known when its parent has told.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self._files[0]), timeout)
        return code

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; what it has printed, and its errors."""
        self.wait(timeout)
        out, err = (file.read_text() for file in self._files)
        return out, err


@functools.cache
def shared_forking() -> Forking:
    """The one of this test process; it ends with it."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROJECT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    one = Forking(environment)
    atexit.register(one.close)
    return one


def main() -> int:
    die_with_parent()
    with socket.socket(fileno=int(sys.argv[1])) as asking:
        if serve(asking, sys.argv[2:]):
            return 0
    os._exit(0)  # Nothing of ours is to be tidied up.


if __name__ == "__main__":
    sys.exit(main())
