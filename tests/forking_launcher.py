"""The launcher with workers that are forked: TensorFlow is imported once, not by each of them.

``forking_launcher.py ARGUMENTS`` does what ``python -m keras_safe_ckpt launch ARGUMENTS`` does,
except that a process next to the launcher forks the workers for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from typing import Any

from forking import LARGEST_MESSAGE, die_with_parent, serve


class Worker:
    """What the launcher needs to know of a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended = asyncio.Event()

    async def wait(self) -> int:
        await self.ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


class Starter:
    """In the launcher, in place of `asyncio.create_subprocess_exec`."""

    def __init__(self, forking: socket.socket) -> None:
        self._forking = forking
        self._workers: dict[int, Worker] = {}
        self._started: asyncio.Queue[Worker] = asyncio.Queue()
        self._listening = False

    def _hear(self) -> None:
        message = json.loads(self._forking.recv(LARGEST_MESSAGE))
        if "started" in message:
            worker = self._workers[message["started"]] = Worker(message["started"])
            self._started.put_nowait(worker)
        else:
            worker = self._workers[message["ended"]]
            worker.returncode = message["code"]
            worker.ended.set()

    async def __call__(
        self, *command: str, env: Any, stdout: int, stderr: int, **_options: Any
    ) -> Worker:
        if not self._listening:
            self._listening = True
            asyncio.get_running_loop().add_reader(self._forking, self._hear)
        request = json.dumps(
            {"command": list(map(str, command)), "env": dict(env), "cwd": os.getcwd()}
        )
        socket.send_fds(self._forking, [request.encode()], [stdout, stderr])
        return await self._started.get()


def launch(forking: socket.socket) -> int:
    die_with_parent()
    from keras_safe_ckpt.cli.main import main

    asyncio.create_subprocess_exec = Starter(forking)  # type: ignore[assignment]
    return main(["launch", *sys.argv[1:]])


def main() -> int:
    of_launcher, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.close()
        return launch(of_launcher)
    of_launcher.close()
    if serve(ours):
        return 0
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(code if code >= 0 else 128 - code)  # Nothing of ours is to be tidied up.


if __name__ == "__main__":
    sys.exit(main())
