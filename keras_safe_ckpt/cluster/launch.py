"""Start a group of local workers, watch them, and start them again when they ask for it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, NamedTuple, Protocol

from keras_safe_ckpt.cluster.launch_plan import Attempt, Outcome, Plan, describe_code

#: A group that lived so long was not in a crash loop: the pause begins small again.
_LIVED_LONG_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 60.0
#: After one has failed the others are told by the cluster; they are given time to say why they end,
#: and to save. One that was killed may be missed only after ten seconds, by its heartbeat.
_SETTLE_SECONDS = 20.0
_PR_SET_PDEATHSIG = 1


class WorkerScreen(Protocol):
    """Where the output of the workers goes, and what the launcher has to say."""

    def note(self, text: str) -> None: ...

    async def pump(self, worker: int, source: asyncio.StreamReader, target: IO[str]) -> None:
        """Take what ``source`` delivers until it ends; it was meant for ``target``."""


def launch(plan: Plan, printer: WorkerScreen) -> Outcome:
    """Run the group to its end. SIGTERM and SIGINT go to all workers, and end the restarts."""
    return asyncio.run(_Launcher(plan, printer).run())


class _Launcher:
    def __init__(self, plan: Plan, printer: WorkerScreen) -> None:
        self._plan = plan
        self._printer = printer
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._outputs: dict[int, list[_Output]] = {}
        self._pumps: dict[int, list[asyncio.Task[None]]] = {}
        self._attempt = Attempt()
        self._received: list[int] = []
        self._failure_when_told: tuple[int, int] | None = None
        self._told = asyncio.Event()

    async def run(self) -> Outcome:
        attempts: list[Attempt] = []
        pause = self._plan.first_pause_seconds
        with self._signals_forwarded():
            while True:
                attempt = await self._live()
                attempts.append(attempt)
                end = self._end_after(attempt, len(attempts) - 1)
                if end is not None:
                    return Outcome(attempts, *end)
                if attempt.seconds > _LIVED_LONG_SECONDS:
                    pause = self._plan.first_pause_seconds
                worker, code = attempt.first_failure or (0, 0)
                self._printer.note(
                    f"worker {worker} ended with {describe_code(code)}: all start again in "
                    f"{pause:.3g} s (restart {len(attempts)} of {self._plan.max_restarts})"
                )
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._told.wait(), pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                if self._received:
                    return Outcome(attempts, *self._stopped(code))

    def _end_after(self, attempt: Attempt, restarts: int) -> tuple[int, str] | None:
        """The exit code and why, or None to start the group again."""
        worker, code = attempt.first_failure or (0, 0)
        if not code and len(attempt.codes) == self._plan.workers:
            return 0, "all workers finished"
        if self._received:
            return self._stopped(code)
        if code not in self._plan.restart_codes:
            return code, f"worker {worker} failed with {describe_code(code)}"
        if restarts >= self._plan.max_restarts:
            limit = f"the limit of {self._plan.max_restarts} restarts is reached"
            return code, f"worker {worker} ended with {describe_code(code)}, and {limit}"
        return None

    def _stopped(self, code: int) -> tuple[int, str]:
        worker, failed = self._failure_when_told or (0, 0)
        if failed and failed not in self._plan.restart_codes:
            return failed, f"worker {worker} failed with {describe_code(failed)}"
        number = self._received[0]
        # A preempted group says that it wants to be started again, to whoever started us.
        passed_on = code if code in self._plan.restart_codes else 128 + number
        return passed_on, f"stopped by {signal.Signals(number).name}"

    async def _live(self) -> Attempt:
        attempt = self._attempt = Attempt()
        began = time.monotonic()
        with _reserved_ports(self._plan.workers) as ports:
            try:
                await self._start(ports)
                await self._watch(attempt)
            finally:
                self._kill()
                self._processes.clear()
        attempt.seconds = time.monotonic() - began
        return attempt

    async def _start(self, ports: Sequence[int]) -> None:
        for worker in range(self._plan.workers):
            if self._received:
                return
            outputs = [await _open_output(), await _open_output()]
            try:
                process = self._processes[worker] = await asyncio.create_subprocess_exec(
                    *self._plan.command,
                    env=worker_environment(os.environ, ports, worker),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=outputs[0].descriptor,
                    stderr=outputs[1].descriptor,
                    # Ctrl-C reaches the launcher alone, which passes it on once; and a worker can
                    # be ended together with the processes that it started.
                    start_new_session=True,
                    preexec_fn=_end_with_parent(),
                )
            finally:
                for output in outputs:
                    os.close(output.descriptor)
            self._outputs[worker] = outputs
            self._pumps[worker] = [
                asyncio.create_task(self._printer.pump(worker, output.reader, target))
                for output, target in zip(outputs, (sys.stdout, sys.stderr), strict=True)
            ]
            if self._received:  # While it was started: it was not among those that were told.
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL if self._received[1:] else self._received[0])

    async def _watch(self, attempt: Attempt) -> None:
        """Until all have ended, which is bounded once one has failed or we are told to end."""
        waiting = {
            asyncio.create_task(self._wait_for(worker, process, attempt))
            for worker, process in self._processes.items()
        }
        told = asyncio.create_task(self._told.wait())
        schedule: deque[tuple[float, Callable[[], None]]] = deque()
        while waiting:
            left = max(0.0, schedule[0][0] - time.monotonic()) if schedule else None
            events = waiting if told.done() else {*waiting, told}
            done, _ = await asyncio.wait(events, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            waiting -= done
            now = time.monotonic()
            if told in done:
                schedule = deque([(now + self._plan.grace_seconds, self._give_up)])
            elif not (schedule or self._received) and attempt.first_failure:
                # The cluster tells the others first, and they have time to say why they end.
                now += _SETTLE_SECONDS
                schedule.append((now, self._terminate))
                schedule.append((now + self._plan.grace_seconds, self._give_up))
                if waiting:
                    worker, code = attempt.first_failure
                    self._printer.note(
                        f"worker {worker} ended with {describe_code(code)}; the others get "
                        f"SIGTERM if they have not ended in {_SETTLE_SECONDS:g} s"
                    )
            elif schedule and now >= schedule[0][0]:
                schedule.popleft()[1]()
        told.cancel()

    async def _wait_for(
        self, worker: int, process: asyncio.subprocess.Process, attempt: Attempt
    ) -> None:
        code = await process.wait()
        attempt.codes[worker] = 128 - code if code < 0 else code
        # A process that the worker left behind may hold its output open for ever.
        pumps = self._pumps.pop(worker)
        await asyncio.wait(pumps, timeout=1.0)
        for pump, output in zip(pumps, self._outputs.pop(worker), strict=True):
            pump.cancel()
            output.transport.close()

    def _terminate(self) -> None:
        self._send(signal.SIGTERM)

    def _give_up(self) -> None:
        self._kill()
        self._printer.note(
            f"still running {self._plan.grace_seconds:g} s after the signal: the workers are killed"
        )

    def _kill(self) -> None:
        """Also what a worker has started and left behind."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _send(self, number: int) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    @contextlib.contextmanager
    def _signals_forwarded(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def forward(number: int) -> None:
            if not self._received:
                self._failure_when_told = self._attempt.first_failure
            self._received.append(number)
            self._told.set()
            if len(self._received) > 1:
                self._kill()
                self._printer.note("told to end again: the workers are killed")
            else:
                self._send(number)
                name = signal.Signals(number).name
                self._printer.note(f"{name} goes to all workers (again: they are killed)")

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, forward, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def worker_environment(
    environment: Mapping[str, str], ports: Sequence[int], worker: int
) -> dict[str, str]:
    """What tells a worker who it is; output comes line by line, not when a buffer is full."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": worker}}
    return {**environment, "TF_CONFIG": json.dumps(config), "PYTHONUNBUFFERED": "1"}


class _Output(NamedTuple):
    """A pipe: what a worker writes to ``descriptor`` comes out of ``reader``."""

    reader: asyncio.StreamReader
    transport: asyncio.BaseTransport
    descriptor: int


async def _open_output() -> _Output:
    """Not by asyncio, which takes a process for running as long as anybody holds its output."""
    read, write = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", buffering=0)
    )
    return _Output(reader, transport, write)


@contextlib.contextmanager
def _reserved_ports(count: int) -> Iterator[list[int]]:
    """Ports that nobody else gets as long as this lasts, and that the workers can listen on.

    A socket that is bound and does not listen keeps the kernel from handing its port out, and
    with SO_REUSEADDR on both sides (gRPC sets it) it is not in the way of the one who listens.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            reserved = stack.enter_context(socket.socket())
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            ports.append(int(reserved.getsockname()[1]))
        yield ports


def _end_with_parent() -> Callable[[], None] | None:
    """Have the workers of a launcher that was killed killed as well; nobody else would do it.

    Not by SIGTERM: TensorFlow catches that one in every worker of a cluster, and goes on.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) and None
